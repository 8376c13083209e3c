"""What is checked of one ONNX file, one engine, one decoder, in the order in which it may be trusted."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from modpass.errors import MissingExtraError, VerificationError
from modpass.exporters import trt_api
from modpass.exporters.bucket_manifest import BucketManifest
from modpass.exporters.checks import NotRun, Series
from modpass.exporters.decoder_manifest import FILE, DecoderManifest, Ports
from modpass.exporters.decoder_probe import run_decoder_probe
from modpass.exporters.external import check_external, read_graph
from modpass.exporters.manifest import Manifest, manifest_path
from modpass.exporters.myelin import program
from modpass.exporters.plan import check_target, read_plan
from modpass.exporters.structure import check_structure
from modpass.exporters.triton import check_repository
from modpass.exporters.verify import VerificationReport, compare, run_probe
from modpass.model import RoutedModel

__all__ = ["check_buckets", "check_decoder", "check_file", "check_triton"]

Model = RoutedModel | torch.nn.Module | None


def check_file(path: Path, label: str, model: Model = None) -> Series:
    """An ONNX file or an engine; its outputs beside the ``model``'s where one is given."""
    series, found = Series(label), dict[str, Manifest]()

    def manifest() -> str:
        found["it"] = Manifest.load(manifest_path(path))
        return f"a sound manifest of an {'ONNX file' if found['it'].kind == 'onnx' else 'engine'}"

    series.run("manifest", manifest)
    if not found:
        return series
    if found["it"].kind == "engine":
        _engine(series, path, found["it"])
    else:
        _onnx(series, path, found["it"], model)
    return series


def _onnx(series: Series, path: Path, manifest: Manifest, model: Model) -> None:
    def hashes() -> str:
        manifest.check(path)
        return f"SHA-256 of {_some(1 + sum(p is not None for p in (manifest.data, manifest.probe)), 'file')}"

    def external() -> str:
        files = check_external(path)
        own = {manifest.data.file} if manifest.data is not None else set()
        if stray := sorted(files.keys() - own):
            raise VerificationError(f"'{path}' reads weights from '{stray[0]}', which its manifest does not vouch for")
        return f"weights lie in {', '.join(files) or 'the file itself'}"

    def structure() -> str:
        check_structure(path, read_graph(path), manifest)
        ports = len(manifest.inputs) + len(manifest.outputs)
        return f"{ports} inputs and outputs, {_some(len(manifest.routed_blocks), 'routed block')} as in the graph"

    def parity() -> str:
        if model is not None:
            return _figures(compare(model, path, manifest)[0], "the model")
        if manifest.dtype == "bfloat16":
            raise NotRun("ONNX Runtime cannot run bfloat16 on a CPU")
        if manifest.probe is None:
            raise NotRun("no outputs were recorded; verify(model, path) does, as 'modpass export' does")
        return _figures(run_probe(path, manifest), "the recorded outputs")

    series.run("hashes", hashes)
    series.run("external data", external)
    series.run("structure", structure)
    if not (path.parent / FILE).is_file():  # a decoder's graphs are run together
        series.run("parity", parity)


def _some(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _figures(report: VerificationReport, beside: str) -> str:
    report.check()
    worst = max((d.max_rel for d in report.outputs), default=0.0)
    choices = f", token choices {min(report.choices.values()):.2%} equal" if report.choices else ""
    return f"within {worst:.1e} of {beside}{choices}"


def _engine(series: Series, path: Path, manifest: Manifest) -> None:
    def target() -> str:
        flavor = trt_api.find(manifest.flavor or "")
        version = _installed(flavor.name)
        gpu = ".".join(map(str, torch.cuda.get_device_capability())) if torch.cuda.is_available() else None
        check_target(path, manifest, flavor.name, version, gpu, "build it again with: modpass build")
        unknown = [w for w, known in (("version", version), ("GPU", gpu)) if known is None]
        built = f"{flavor.title}, compute capability {' and '.join(manifest.compute_capabilities)}"
        return built + (f"; this machine's {' and '.join(unknown)} unknown" if unknown else "")

    def content() -> str:
        plan = read_plan(path, manifest)
        if manifest.flavor == "tensorrt-rtx" and (own := program(plan).capabilities) != manifest.compute_capabilities:
            raise VerificationError(
                f"'{path}' says that it is for compute capability {' and '.join(own) or 'none'}, its manifest "
                f"for {' and '.join(manifest.compute_capabilities) or 'none'}; build it again"
            )
        return f"SHA-256 of {len(plan)} bytes"

    def origin() -> str:
        graph = path.with_suffix(".onnx")
        if not manifest_path(graph).is_file():
            raise NotRun(f"the file it was built from is not beside it ('{graph.name}')")
        source = Manifest.load(manifest_path(graph))
        if source.sha256 != manifest.onnx_sha256:
            raise VerificationError(
                f"'{path}' was built from another {graph.name} than the one beside it; build it again"
            )
        for what in ("inputs", "outputs", "routed_blocks", "shape"):
            if getattr(source, what) != getattr(manifest, what):
                raise VerificationError(f"'{path}' and '{graph}' differ in their {what}; build the engine again")
        return f"built from {graph.name}"

    series.run("target", target)
    series.run("hashes", content)
    series.run("structure", origin)


def _installed(flavor: str) -> str | None:
    """The version of TensorRT here; None where there is none."""
    if importlib.util.find_spec(trt_api.find(flavor).module) is None:
        return None
    try:
        return trt_api.load(flavor).version
    except MissingExtraError:
        return None


def check_decoder(folder: Path, label: str) -> Series:
    """A decoder's folder as a whole; its graphs are files of their own."""
    series, found = Series(label), dict[str, DecoderManifest]()

    def manifest() -> str:
        found["it"] = DecoderManifest.load(folder)
        return f"a sound manifest of {_some(len(found['it'].files), 'file')}"

    def hashes() -> str:
        found["it"].check(folder)
        return f"SHA-256 of {_some(len(found['it'].files), 'file')}"

    def structure() -> str:
        graphs = {n: Manifest.load(manifest_path(folder / f"{n}.onnx")) for n in ("decode", "prefill")}
        for name, graph in graphs.items():
            if graph.sha256 != found["it"].files[f"{name}.onnx"]:
                raise VerificationError(
                    f"'{folder / FILE}' and the manifest of {name}.onnx differ; export the model again"
                )
        ports = [_ports(graphs[n]) for n in ("decode", "prefill")]
        found["it"].match(*ports)
        caches, blocks = len(list(found["it"].all_caches())), len(found["it"].routing)
        return f"{_some(caches, 'cache')}, {_some(blocks, 'routed block')} as in the graphs"

    def parity() -> str:
        if found["it"].dtype == "bfloat16":
            raise NotRun("ONNX Runtime cannot run bfloat16 on a CPU")
        return _figures(run_decoder_probe(folder, found["it"]), "the recorded prompt and step")

    series.run("manifest", manifest)
    if found:
        series.run("hashes", hashes)
        series.run("structure", structure)
        series.run("parity", parity)
    return series


def check_buckets(folder: Path, label: str) -> Series:
    """A folder of buckets, or a Triton repository of them; its graphs are files of their own."""
    series = Series(label)

    def hashes() -> str:
        manifest = BucketManifest.load(folder)
        manifest.check(folder)
        return f"SHA-256 of {_some(len(manifest.files), 'file')} of {_some(len(manifest.buckets), 'bucket')}"

    series.run("hashes", hashes)
    return series


def check_triton(folder: Path, label: str) -> Series:
    """What a Triton repository serves: graphs, weights, configurations, what the warm-up reads."""
    series = Series(label)
    series.run("hashes", lambda: f"SHA-256 of {_some(check_repository(folder), 'file')}")
    return series


def _ports(manifest: Manifest) -> Ports:
    inputs, outputs = ({s.name: s.shape for s in specs} for specs in (manifest.inputs, manifest.outputs))
    return Ports(inputs, outputs)
