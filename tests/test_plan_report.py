"""What a plan says of itself, with and without a GPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modpass.errors import BuildError, StateError, VerificationError
from modpass.exporters import build_engine, trt_api
from modpass.exporters.manifest import Manifest, manifest_path
from modpass.exporters.myelin import program
from modpass.exporters.plan_report import inspected, plan_report
from modpass.files import sha256
from tests.commands import Capture, fails, rows, run
from tests.onnx_text import MLP, write
from tests.trt_fake import fake_runtime

WIDE = MLP.replace("8,16]", "64,16]")
BRANCH = (
    "(float[1,8] x, bool c) => (float[1,8] y) {y = If(c) <then_branch = t () => (float[1,8] a) {a = Relu(x)}, "
    "else_branch = e () => (float[1,8] b) {b = Exp(x)}>}"
)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small engine, one of eight times as many rows for two targets, and one with a branch."""
    pytest.importorskip("tensorrt_rtx", reason="pip install 'modpass[tensorrt-rtx]'")
    folder = tmp_path_factory.mktemp("engines")
    for name, body, target in (("mlp", MLP, "8.9"), ("wide", WIDE, ("8.9", "8.6")), ("branch", BRANCH, "8.9")):
        build_engine(write(folder / f"{name}.onnx", body), folder / f"{name}.engine", "tensorrt-rtx", target,
                     progress=False)  # fmt: skip
    return folder


def test_a_plan_tells_targets_kernels_bytes_and_memory(engines: Path) -> None:
    found = plan_report(engines / "mlp.engine")
    assert (found.compute_capabilities, found.capturable, found.source) == (("8.9",), True, "plan text")
    assert found.file_bytes == (engines / "mlp.engine").stat().st_size
    assert {n for k in found.kernels for n in k.nodes} <= {"", *found_nodes(engines / "mlp.onnx")}
    assert found.moved_bytes is not None
    # x [8, 16] and w [16, 16] are read, y [8, 16] is written, 4 bytes each
    assert found.moved_bytes >= (8 + 16 + 8) * 16 * 4
    wide = plan_report(engines / "wide.engine")
    assert wide.compute_capabilities == ("8.6", "8.9")
    assert wide.moved_bytes is not None
    assert wide.moved_bytes >= found.moved_bytes + 2 * (64 - 8) * 16 * 4
    assert wide.device_memory > 0


def found_nodes(path: Path) -> set[str]:
    import onnx

    nodes = onnx.load(path).graph.node
    return {n.name for n in nodes} | {f"node_of_{n.output[0]}" for n in nodes}


def test_a_plan_with_a_branch_is_no_cuda_graph(engines: Path) -> None:
    assert plan_report(engines / "branch.engine").capturable is False


def test_several_targets_are_in_the_manifest_and_in_the_plan(engines: Path) -> None:
    built = Manifest.load(engines / "wide.engine.json")
    assert built.compute_capabilities == ("8.6", "8.9")
    assert program((engines / "wide.engine").read_bytes()).capabilities == ("8.6", "8.9")


def test_two_engines_stand_side_by_side(engines: Path, capsys: Capture) -> None:
    out, _ = run(capsys, "plan-report", engines / "wide.engine", engines / "mlp.engine", "--kernels", 1)
    small, wide = (plan_report(engines / f"{n}.engine").moved_bytes for n in ("mlp", "wide"))
    assert small is not None
    assert wide is not None
    assert rows(out, "bytes moved")[0][-1] == f"{small / wide:.2f}"
    assert rows(out, "one CUDA graph")[0][1:3] == ["yes", "yes"]
    assert rows(out, "compute capability")[0][1:3] == ["8.6, 8.9", "8.9"]
    assert "an upper bound, not a measurement" in out


def test_what_is_no_engine_is_refused(engines: Path, capsys: Capture, tmp_path: Path) -> None:
    assert "there is no manifest" in fails(capsys, 1, "plan-report", engines / "mlp.onnx")
    (tmp_path / "e").write_bytes((engines / "mlp.engine").read_bytes()[:-1] + b"!")
    Manifest.load(engines / "mlp.engine.json").save(tmp_path / "e.json")
    with pytest.raises(VerificationError, match="is not the file its manifest was written for"):
        plan_report(tmp_path / "e")
    assert "one engine is reported, or two" in fails(capsys, 2, "plan-report", *[engines / "mlp.engine"] * 3)


def test_a_plan_without_text_is_refused_in_words() -> None:
    with pytest.raises(BuildError, match="holds no program text, which TensorRT-RTX alone writes"):
        program(b"header {\n  version = 5\n}\0")


# The inspector


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine of a full TensorRT whose engines ONNX Runtime runs, and a GPU."""
    source = write(tmp_path / "m.onnx", MLP)
    engine = tmp_path / "m.engine"
    engine.write_text(f"{source}\n")
    from modpass.exporters.manifest import TensorSpec

    x, y = (TensorSpec(n, (1, 8, 16), "float32") for n in "xy")
    Manifest(
        "engine", "m.engine", sha256(engine), 18, "float32", (x,), (y,), flavor="tensorrt",
        compute_capabilities=("9.0",), versions={"tensorrt": "10.9"}, bytes=engine.stat().st_size,
    ).save(manifest_path(engine))  # fmt: skip
    monkeypatch.setattr(trt_api, "_LOGGERS", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return engine


@pytest.mark.parametrize(
    "layers", [["a", "b"], [{"Name": "a"}, {"Name": "b", "Inputs": []}]], ids=["names", "detailed"]
)
def test_full_tensorrt_is_asked_through_its_inspector(
    layers: list[Any], full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"Layers": layers, "I/O Tensors": []})
    inspector = SimpleNamespace(get_engine_information=lambda form: text)
    module = fake_runtime(change=lambda e: setattr(e, "create_engine_inspector", lambda: inspector))
    module.LayerInformationFormat = SimpleNamespace(JSON="json")
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    found = plan_report(full)
    assert [k.name for k in found.kernels] == ["a", "b"]
    assert (found.source, found.device_memory, found.moved_bytes) == ("engine inspector", 64, None)
    assert found.capturable is None


def test_an_inspector_that_tells_nothing_is_refused(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inspector = SimpleNamespace(get_engine_information=lambda form: "no JSON")
    module = fake_runtime(change=lambda e: setattr(e, "create_engine_inspector", lambda: inspector))
    module.LayerInformationFormat = SimpleNamespace(JSON="json")
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    with pytest.raises(BuildError, match="the engine inspector gave no list of layers"):
        plan_report(full)


def test_without_a_gpu_full_tensorrt_cannot_be_reported(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StateError, match=r"only the GPU that .* was built for can report it"):
        plan_report(full)


@pytest.mark.gpu
def test_on_a_gpu_the_inspector_reports_the_layers(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    if capability not in trt_api.FLAVORS["tensorrt-rtx"].capabilities:
        pytest.skip(f"TensorRT-RTX does not build for compute capability {capability}")
    path = write(tmp_path / "m.onnx", MLP)
    build_engine(
        path, tmp_path / "m.engine", "tensorrt-rtx", capability, profiling_verbosity="detailed", progress=False
    )
    found = inspected(tmp_path / "m.engine")
    assert found.kernels
    assert found.source == "engine inspector"


# Engines without weights


def stripped(full: Path, module: Any, monkeypatch: pytest.MonkeyPatch, digest: str) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    facts = Manifest.load(manifest_path(full))
    replace(facts, stripped=True, onnx_sha256=digest).save(manifest_path(full))


def test_weights_are_put_in_from_the_file_that_the_engine_was_built_from(
    full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    module = fake_runtime(change=lambda e: setattr(e, "create_engine_inspector", lambda: layers))
    layers = SimpleNamespace(get_engine_information=lambda form: '{"Layers": []}')
    module.LayerInformationFormat = SimpleNamespace(JSON="json")
    module.Refitter = lambda engine, logger: SimpleNamespace(refit_cuda_engine=lambda: asked.append("refit") or True)
    module.OnnxParserRefitter = lambda refitter, logger: SimpleNamespace(
        refit_from_file=lambda path: asked.append(Path(path).name) or "refuse" not in asked
    )
    stripped(full, module, monkeypatch, sha256(full.with_suffix(".onnx")))
    plan_report(full)
    assert asked == ["m.onnx", "refit"]
    asked[:] = ["refuse"]
    with pytest.raises(BuildError, match=r"took no weights of '.*m.onnx' into '.*m.engine': it gave no reason"):
        plan_report(full)
    stripped(full, module, monkeypatch, "00")
    with pytest.raises(VerificationError, match=r"m.engine' holds no weights, and '.*m.onnx' is not the file that it"):
        plan_report(full)
