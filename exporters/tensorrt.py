"""Build a TensorRT or TensorRT-RTX engine from an ONNX file with fixed shapes, and write its manifest."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from modpass.errors import BuildError, InputError, VerificationError
from modpass.exporters.external import check_external, read_graph
from modpass.exporters.manifest import Manifest, TensorSpec, manifest_path, versions
from modpass.exporters.origins import places_by_name
from modpass.exporters.preflight import Refusal, preflight
from modpass.exporters.trt_api import Flavor, TensorRT, find, load, parse_capability
from modpass.exporters.trt_options import BuildOptions, Verbosity
from modpass.exporters.trt_progress import build
from modpass.files import sha256, whole_file

__all__ = ["build_engine"]


def build_engine(
    onnx: str | os.PathLike[str],
    engine: str | os.PathLike[str],
    flavor: str = "tensorrt-rtx",
    compute_capability: str | Sequence[str] = "8.9",
    *,
    optimization_level: int | None = None,
    workspace_bytes: int | None = None,
    timing_cache: str | os.PathLike[str] | None = None,
    profiling_verbosity: Verbosity | None = None,
    refit: bool = False,
    strip_weights: bool = False,
    progress: bool = True,
) -> Manifest:
    """Build ``engine`` and ``engine + ".json"`` from the ONNX file ``onnx``, in the precision of its graph.

    The manifest beside ``onnx``, if there is one, is checked first; then everything TensorRT is known to
    refuse is listed before TensorRT is imported. TensorRT-RTX builds for any known GPU, also where there is
    none; full TensorRT builds for the GPU of this machine, whose compute capability must be the one given.
    Ctrl-C cancels the build and leaves no file.

    Args:
        onnx: an ONNX file whose every dim is an integer; external data in the same folder is read too.
        engine: the file to write, whole or not at all.
        flavor: ``"tensorrt-rtx"`` or ``"tensorrt"``.
        compute_capability: the target GPU, for instance ``"8.6"``; TensorRT-RTX takes several for one engine.
        optimization_level: 0 (fast build) to 5 (fast engine); None keeps TensorRT's default.
        workspace_bytes: the most scratch memory a layer may use; None keeps TensorRT's default.
        timing_cache: a file of kernel timings, read if present and written back (full TensorRT only).
        profiling_verbosity: what the engine inspector can tell of each layer: "none", "layer_names_only", "detailed".
        refit: weights can be replaced in the built engine.
        strip_weights: the engine holds no weights; they are put in from the ONNX file when it is loaded.
        progress: show a progress bar on the error stream.

    Raises:
        InputError: a flag out of range, no such flavour, or no such file.
        VerificationError: the ONNX file is not what its manifest says.
        MissingExtraError: TensorRT is not installed.
        BuildError: TensorRT refused the model, or would; the message names the torch module where known.

    >>> build_engine("absent.onnx", "absent.engine")
    Traceback (most recent call last):
    modpass.errors.InputError: there is no ONNX file 'absent.onnx'
    """
    source, facts = Path(onnx), find(flavor)
    options = BuildOptions(
        optimization_level, workspace_bytes, timing_cache, profiling_verbosity, refit, strip_weights
    )  # fmt: skip
    options.check(facts)
    targets = _targets(compute_capability, facts)
    model, manifest = _read(source)
    refusals = [r for target in targets for r in preflight(model, manifest, flavor, target)]
    _refuse(source, list(dict.fromkeys(refusals)), facts)
    trt = load(flavor)
    _check_machine(facts, targets[0])
    started = time.perf_counter()
    places = places_by_name(model)
    builder = trt.builder()
    network = trt.network(builder)
    parser = _parse(trt, network, source, places)
    config = trt.config(builder)
    trt.target(config, targets)
    cache = options.apply(trt, config)
    plan = build(trt, builder, network, config, progress)
    if plan is None:
        raise _failure(trt, f"could not build '{source}' for compute capability {' and '.join(targets)}", places)
    del parser  # it owns weights that the network refers to until the build is over
    seconds = round(time.perf_counter() - started, 3)
    built = replace(
        manifest, kind="engine", file=Path(engine).name, data=None, probe=None, flavor=flavor,
        onnx_sha256=manifest.sha256, compute_capabilities=targets, stripped=strip_weights, build_seconds=seconds,
        versions={**manifest.versions, **versions(facts.module)},
    )  # fmt: skip
    built = _write(engine, plan, built)
    if cache is not None:
        options.save(cache)
    return built


def _write(engine: str | os.PathLike[str], plan: Any, manifest: Manifest) -> Manifest:
    with whole_file(engine) as temporary:
        temporary.write_bytes(memoryview(plan))
        manifest = replace(manifest, sha256=sha256(temporary), bytes=temporary.stat().st_size)
    manifest.save(manifest_path(engine))
    return manifest


def _targets(given: str | Sequence[str], facts: Flavor) -> tuple[str, ...]:
    targets = (given,) if isinstance(given, str) else tuple(dict.fromkeys(given))
    if not targets:
        raise InputError("compute_capability is empty; name at least one, such as '8.9'")
    for target in targets:
        parse_capability(target)
    if targets[1:] and not facts.capabilities:
        raise InputError(
            f"{facts.title} builds for the GPU of this machine alone; compute_capability is {', '.join(targets)}: "
            f"give one, or use flavor='tensorrt-rtx'"
        )
    return tuple(sorted(targets, key=parse_capability))


def _read(source: Path) -> tuple[ir.Model, Manifest]:
    """The graph, and its manifest: read and checked if present, else made from the graph."""
    if not source.is_file():
        raise InputError(f"there is no ONNX file '{source}'")
    beside = manifest_path(source)
    manifest = Manifest.load(beside) if beside.exists() else None
    if manifest is not None:
        manifest.check(source)
        if manifest.kind != "onnx":
            raise InputError(f"'{source}' is an {manifest.kind} already; give the ONNX file that it was built from")
    try:
        graph = read_graph(source)
    except VerificationError as e:
        raise InputError(str(e)) from e
    check_external(source, graph)
    model = ir.load(source)
    return model, manifest or _describe(model, source)


def _describe(model: ir.Model, source: Path) -> Manifest:
    present = {v.dtype for v in model.graph.initializers.values()}
    half = next((d for d in (ir.DataType.BFLOAT16, ir.DataType.FLOAT16) if d in present), ir.DataType.FLOAT)
    return Manifest(
        "onnx", source.name, sha256(source), model.opset_imports.get("", 0), str(half.numpy()),
        inputs=tuple(map(_spec, model.graph.inputs)), outputs=tuple(map(_spec, model.graph.outputs)),
    )  # fmt: skip


def _spec(value: ir.Value) -> TensorSpec:
    dims = tuple(d if isinstance(d, int) else -1 for d in value.shape or ())
    return TensorSpec(value.name or "", dims, str(value.dtype.numpy()) if value.dtype else "unknown")


def _refuse(source: Path, refusals: list[Refusal], facts: Flavor) -> None:
    if refusals:
        listed = "\n".join(f"  - {r}" for r in refusals)
        raise BuildError(f"{facts.title} would refuse '{source}':\n{listed}")


def _check_machine(facts: Flavor, wanted: str) -> None:
    """Full TensorRT builds for the present GPU only; a manifest that says otherwise would lie."""
    if facts.capabilities:
        return
    own = ".".join(map(str, torch.cuda.get_device_capability())) if torch.cuda.is_available() else None
    if own != wanted:
        found = f"has compute capability {own}" if own else "cannot be found (PyTorch sees none)"
        raise BuildError(
            f"full TensorRT builds only for the GPU of this machine, which {found}; compute_capability is "
            f"{wanted}. Build there, or use flavor='tensorrt-rtx', which builds for any listed GPU"
        )


def _parse(trt: TensorRT, network: Any, source: Path, places: dict[str, str]) -> Any:
    parser = trt.parser(network)
    # by path, not by bytes: external data is looked up beside the file
    if parser.parse_from_file(str(source.resolve())):
        return parser
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    said = "; ".join(f"{_where(e)}{e.desc()}" for e in errors[:1])
    raise _failure(trt, f"could not parse '{source}'", places, said or None)


def _where(error: Any) -> str:
    """ONNX operator and node of a parser error, in versions that tell them."""
    node = error.node_name() if hasattr(error, "node_name") else ""
    operator = error.node_operator() if hasattr(error, "node_operator") else ""
    return f"{operator or 'node'} '{node}': " if node or operator else ""


def _failure(trt: TensorRT, sentence: str, places: dict[str, str], said: str | None = None) -> BuildError:
    said = said or trt.log.first_error() or "it gave no reason"
    words = {word.strip(".:") for word in re.findall(r"[\w.:/\-]+", said)}
    found = sorted(f"node '{word}' of {places[word]}" for word in words if word in places)
    place = f" (at {', '.join(found)})" if found else ""
    return BuildError(f"{trt.flavor.title} {trt.version} {sentence}{place}: {said}")
