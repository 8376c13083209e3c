"""Build a TensorRT or TensorRT-RTX engine from an ONNX file with fixed shapes, and write its manifest."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from modpass.errors import BuildError, InputError
from modpass.exporters.islands import module_scopes
from modpass.exporters.manifest import Manifest, TensorSpec, manifest_path, versions
from modpass.exporters.preflight import Refusal, preflight
from modpass.exporters.trt_api import Flavor, TensorRT, find, load, parse_capability
from modpass.exporters.trt_progress import build
from modpass.files import sha256, whole_file

__all__ = ["build_engine"]


def build_engine(
    onnx: str | os.PathLike[str],
    engine: str | os.PathLike[str],
    flavor: str = "tensorrt-rtx",
    compute_capability: str = "8.9",
    *,
    optimization_level: int | None = None,
    workspace_bytes: int | None = None,
    timing_cache: str | os.PathLike[str] | None = None,
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
        compute_capability: the target GPU, for instance ``"8.6"``.
        optimization_level: 0 (fast build) to 5 (fast engine); None keeps TensorRT's default.
        workspace_bytes: the most scratch memory a layer may use; None keeps TensorRT's default.
        timing_cache: a file of kernel timings, read if present and written back (full TensorRT only).
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
    options = _Options(optimization_level, workspace_bytes, timing_cache)
    options.check(facts)
    parse_capability(compute_capability)
    model, manifest = _read(source)
    _refuse(source, preflight(model, manifest, flavor, compute_capability), facts)
    trt = load(flavor)
    _check_machine(facts, compute_capability)
    started = time.perf_counter()
    names = _scopes_by_name(model)
    builder = trt.builder()
    network = trt.network(builder)
    parser = _parse(trt, network, source, names)
    config = trt.config(builder)
    trt.target(config, compute_capability)
    cache = options.apply(trt, config)
    plan = build(trt, builder, network, config, progress)
    if plan is None:
        raise _failure(trt, f"could not build '{source}' for compute capability {compute_capability}", names)
    del parser  # it owns weights that the network refers to until the build is over
    seconds = round(time.perf_counter() - started, 3)
    built = replace(
        manifest, kind="engine", file=Path(engine).name, data=None, flavor=flavor,
        onnx_sha256=manifest.sha256, compute_capabilities=(compute_capability,), build_seconds=seconds,
        versions={**manifest.versions, **versions(facts.module)},
    )  # fmt: skip
    built = _write(engine, plan, built)
    if cache is not None:
        options.save(cache)
    return built


@dataclass(frozen=True)
class _Options:
    level: int | None
    workspace: int | None
    cache: str | os.PathLike[str] | None

    def check(self, facts: Flavor) -> None:
        if self.level is not None and self.level not in range(6):
            raise InputError(f"optimization_level is {self.level}, allowed are 0 to 5")
        if self.workspace is not None and self.workspace <= 0:
            raise InputError(f"workspace_bytes is {self.workspace}, it must be a positive number of bytes")
        if self.cache is not None and facts.capabilities:
            raise InputError(
                f"timing_cache has no effect in {facts.title}, which picks kernels at load time; leave it out"
            )

    def apply(self, trt: TensorRT, config: Any) -> Any:
        """Set what was given; returns the timing cache, if there is one."""
        if self.level is not None:
            config.builder_optimization_level = self.level
        if self.workspace is not None:
            trt.workspace(config, self.workspace)
        if self.cache is None:
            return None
        known = Path(self.cache)
        return trt.timing_cache(config, known.read_bytes() if known.exists() else b"")

    def save(self, cache: Any) -> None:
        content = cache.serialize()
        if self.cache is not None and content is not None:
            with whole_file(self.cache) as temporary:
                temporary.write_bytes(memoryview(content))


def _write(engine: str | os.PathLike[str], plan: Any, manifest: Manifest) -> Manifest:
    with whole_file(engine) as temporary:
        temporary.write_bytes(memoryview(plan))
        manifest = replace(manifest, sha256=sha256(temporary), bytes=temporary.stat().st_size)
    manifest.save(manifest_path(engine))
    return manifest


def _read(source: Path) -> tuple[ir.Model, Manifest]:
    """The graph, and its manifest: read and checked if present, else made from the graph."""
    if not source.is_file():
        raise InputError(f"there is no ONNX file '{source}'")
    beside = manifest_path(source)
    manifest = Manifest.load(beside) if beside.exists() else None
    if manifest is not None:
        manifest.check(source)
    try:
        model = ir.load(source)
    except Exception as e:  # protobuf and onnx_ir raise many kinds
        raise InputError(f"'{source}' cannot be read as an ONNX model: {e}") from e
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


def _parse(trt: TensorRT, network: Any, source: Path, names: dict[str, str]) -> Any:
    parser = trt.parser(network)
    # by path, not by bytes: external data is looked up beside the file
    if parser.parse_from_file(str(source.resolve())):
        return parser
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    said = "; ".join(f"{_where(e)}{e.desc()}" for e in errors[:1])
    raise _failure(trt, f"could not parse '{source}'", names, said or None)


def _where(error: Any) -> str:
    """ONNX operator and node of a parser error, in versions that tell them."""
    node = error.node_name() if hasattr(error, "node_name") else ""
    operator = error.node_operator() if hasattr(error, "node_operator") else ""
    return f"{operator or 'node'} '{node}': " if node or operator else ""


def _failure(trt: TensorRT, sentence: str, names: dict[str, str], said: str | None = None) -> BuildError:
    said = said or trt.log.first_error() or "it gave no reason"
    words = {word.strip(".:") for word in re.findall(r"[\w.:/\-]+", said)}
    places = {f"node '{word}' of module '{names[word]}'" for word in words if word in names}
    place = f" (at {', '.join(sorted(places))})" if places else ""
    return BuildError(f"{trt.flavor.title} {trt.version} {sentence}{place}: {said}")


def _scopes_by_name(model: ir.Model) -> dict[str, str]:
    """Torch module by every name TensorRT may use for a node: its own, or one made from its first output."""
    found = {}
    for node in model.graph.all_nodes():
        module = next(reversed(module_scopes(node)), None)
        if module is not None:
            found.update({n: module for n in (node.name, f"node_of_{node.outputs[0].name}") if n})
    return found
