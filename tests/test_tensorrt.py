"""Engines are built; a failed or cancelled build says why and leaves no file."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch

from modpass.errors import BuildError, InputError, MissingExtraError, VerificationError
from modpass.exporters import tensorrt, trt_api, trt_progress
from modpass.exporters.manifest import DataFile, Manifest, RoutedSpec, TensorSpec, manifest_path
from modpass.exporters.precision import to_precision
from modpass.exporters.tensorrt import build_engine
from modpass.files import sha256
from tests.onnx_text import MLP, text, topk, write

# Real builds


@pytest.mark.parametrize("capability", ["8.6", "8.9"])
def test_a_float32_model_builds_and_its_manifest_describes_it(tmp_path: Path, capability: str) -> None:
    path = write(tmp_path / "mlp.onnx", MLP)
    built = build_engine(path, tmp_path / "mlp.engine", compute_capability=capability, progress=False)
    assert Manifest.load(tmp_path / "mlp.engine.json") == built
    built.check(tmp_path / "mlp.engine")
    assert (built.kind, built.flavor, built.compute_capabilities) == ("engine", "tensorrt-rtx", (capability,))
    assert built.onnx_sha256 == sha256(path)
    assert built.bytes == (tmp_path / "mlp.engine").stat().st_size
    assert built.inputs == (TensorSpec("x", (1, 8, 16), "float32"),)
    assert built.opset == 18
    assert "tensorrt_rtx" in built.versions
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mlp.engine", "mlp.engine.json", "mlp.onnx"]


@pytest.mark.parametrize("capability", ["8.6", "8.9"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_models_build_and_the_graph_decides(tmp_path: Path, dtype: Any, capability: str) -> None:
    path = write(tmp_path / "mlp.onnx", MLP)
    ir.save(to_precision(ir.load(path), dtype), path)
    built = build_engine(path, tmp_path / "mlp.engine", compute_capability=capability, progress=False)
    assert built.dtype == dtype
    assert built.outputs == (TensorSpec("y", (1, 8, 16), dtype),)


def test_the_target_is_part_of_the_engine(tmp_path: Path) -> None:
    path = write(tmp_path / "mlp.onnx", MLP)
    for capability in ("8.6", "8.9"):
        build_engine(path, tmp_path / capability, compute_capability=capability, progress=False)
    assert b"sm86" in (tmp_path / "8.6").read_bytes()
    assert b"sm89" in (tmp_path / "8.9").read_bytes()
    assert b"sm86" not in (tmp_path / "8.9").read_bytes()


def test_an_exported_torch_module_builds_with_external_data_and_options(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval()
    program = torch.onnx.export(model, (torch.randn(2, 8),), dynamo=True, opset_version=18, verbose=False)
    assert program is not None
    path = tmp_path / "mlp.onnx"
    ir.save(program.model, path, external_data="mlp.onnx.data", size_threshold_bytes=0)
    data = DataFile("mlp.onnx.data", sha256(tmp_path / "mlp.onnx.data"))
    facts = Manifest(
        "onnx", path.name, sha256(path), 18, "float32", data=data, settings={"every": 2},
        routed_blocks={"0": RoutedSpec(0.5, 4, 2, "linear", "expert_choice")},
    )  # fmt: skip
    facts.save(manifest_path(path))
    built = build_engine(path, tmp_path / "mlp.engine", optimization_level=0, workspace_bytes=1 << 26, progress=False)
    assert built.settings == {"every": 2}
    assert built.routed_blocks == facts.routed_blocks
    assert built.data is None
    (tmp_path / "mlp.onnx.data").write_bytes(b"other weights")
    with pytest.raises(VerificationError, match=r"mlp\.onnx\.data' is not the file"):
        build_engine(path, tmp_path / "mlp.engine", progress=False)


def test_a_file_that_is_not_what_its_manifest_says_is_not_built(tmp_path: Path) -> None:
    path = write(tmp_path / "mlp.onnx", MLP)
    Manifest("onnx", path.name, "0" * 64, 18, "float32").save(manifest_path(path))
    with pytest.raises(VerificationError, match="is not the file its manifest was written for"):
        build_engine(path, tmp_path / "mlp.engine", progress=False)
    assert not (tmp_path / "mlp.engine").exists()


def test_a_progress_bar_is_drawn_on_the_error_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    build_engine(write(tmp_path / "mlp.onnx", MLP), tmp_path / "mlp.engine", progress=True)
    drawn = capsys.readouterr()
    assert drawn.out == ""
    assert "Building" in drawn.err


# Arguments


@pytest.mark.parametrize("capability", ["sm_89", "8", "8.9.1", "", "89"])
def test_a_malformed_compute_capability_is_refused(tmp_path: Path, capability: str) -> None:
    path = write(tmp_path / "mlp.onnx", MLP)
    with pytest.raises(InputError, match=r"compute_capability is '.*', it must look like '8\.9'"):
        build_engine(path, tmp_path / "e", compute_capability=capability)


@pytest.mark.parametrize(("flavor", "capability", "message"), [
    ("tensorrt-rtx", "9.0", r"builds for 7\.5, 8\.0, 8\.6, 8\.9, 12\.0, 12\.1, not for 9\.0"),
    ("tensorrt", "7.0", r"TensorRT needs compute capability 7\.5 or later, not 7\.0"),
])  # fmt: skip
def test_a_gpu_the_flavour_does_not_know_is_refused(tmp_path: Path, flavor: str, capability: str, message: str) -> None:
    path = write(tmp_path / "mlp.onnx", MLP)
    with pytest.raises(BuildError, match=message):
        build_engine(path, tmp_path / "e", flavor, capability)


def test_the_known_compute_capabilities_are_those_of_the_installed_module() -> None:
    module = trt_api.load("tensorrt-rtx").module
    names = {n for n in module.ComputeCapability.__members__ if n.startswith("SM")}
    assert {"SM" + c.replace(".", "") for c in trt_api.FLAVORS["tensorrt-rtx"].capabilities} == names


@pytest.mark.parametrize(("options", "message"), [
    ({"flavor": "trt"}, "flavor is 'trt', allowed are: tensorrt-rtx, tensorrt"),
    ({"optimization_level": 6}, "optimization_level is 6, allowed are 0 to 5"),
    ({"workspace_bytes": 0}, "workspace_bytes is 0, it must be a positive number"),
    ({"timing_cache": "t.cache"}, "timing_cache has no effect in TensorRT-RTX"),
    ({"compute_capability": ()}, "compute_capability is empty; name at least one"),
    ({"profiling_verbosity": "loud"}, "profiling_verbosity is 'loud', allowed are none, layer_names_only, detailed"),
])  # fmt: skip
def test_a_flag_out_of_range_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_engine(write(tmp_path / "mlp.onnx", MLP), tmp_path / "e", **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("option", ["refit", "strip_weights"])
def test_weights_that_can_change_need_a_gpu_while_rtx_builds(tmp_path: Path, option: str) -> None:
    with pytest.raises(BuildError, match=f"{option} needs an NVIDIA GPU while TensorRT-RTX builds, and PyTorch sees"):
        build_engine(write(tmp_path / "mlp.onnx", MLP), tmp_path / "e", **{option: True})


def test_an_engine_is_not_built_again(tmp_path: Path) -> None:
    path = write(tmp_path / "mlp.onnx", MLP)
    Manifest("engine", path.name, sha256(path), 18, "float32").save(manifest_path(path))
    with pytest.raises(InputError, match="is an engine already; give the ONNX file that it was built from"):
        build_engine(path, tmp_path / "e")


def test_a_missing_and_a_broken_onnx_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no ONNX file"):
        build_engine(tmp_path / "absent.onnx", tmp_path / "e")
    (tmp_path / "broken.onnx").write_bytes(b"not a protobuf")
    with pytest.raises(InputError, match="cannot be read as an ONNX model"):
        build_engine(tmp_path / "broken.onnx", tmp_path / "e")


def test_a_missing_package_names_the_extra_and_refusals_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'modpass\[tensorrt\]'"):
        build_engine(write(tmp_path / "mlp.onnx", MLP), tmp_path / "e", "tensorrt")
    ir.save(topk(4000, 8000), tmp_path / "k.onnx")
    with pytest.raises(BuildError, match="k=4000 of S=8000"):
        build_engine(tmp_path / "k.onnx", tmp_path / "e", "tensorrt")


# Errors


def test_a_failure_names_the_torch_module_of_the_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "preflight", lambda *_: [])
    model = topk(4000, 8000, "layers.3")
    next(iter(model.graph)).name = "node_topk__1"
    ir.save(model, tmp_path / "m.onnx")
    with pytest.raises(BuildError) as caught:
        build_engine(tmp_path / "m.onnx", tmp_path / "e", compute_capability="8.6", progress=False)
    message = str(caught.value)
    assert message.startswith("TensorRT-RTX 1.")
    assert f"could not build '{tmp_path / 'm.onnx'}' for compute capability 8.6" in message
    assert "(at node 'node_topk__1' of module 'layers.3')" in message
    assert "K exceeds the maximum" in message


def test_a_parser_error_names_the_operator_and_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "preflight", lambda *_: [])
    model = ir.from_proto(onnx.parser.parse_model(text("(bool[4] x) => (int64[1,n] y) {y = NonZero(x)}")))
    node = next(iter(model.graph))
    node.name, node.metadata_props["namespace"] = "node_pick", ": M/layers.1: Block/nonzero: aten.nonzero"
    ir.save(model, tmp_path / "m.onnx")
    with pytest.raises(BuildError, match=r"could not parse .* \(at node 'node_pick' of module 'layers\.1'\): NonZero"):
        build_engine(tmp_path / "m.onnx", tmp_path / "e", progress=False)


def test_messages_of_an_earlier_build_do_not_leak_into_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tensorrt, "preflight", lambda *_: [])
        ir.save(topk(4000, 8000), tmp_path / "m.onnx")
        with pytest.raises(BuildError, match="K exceeds"):
            build_engine(tmp_path / "m.onnx", tmp_path / "e", progress=False)
    build_engine(write(tmp_path / "mlp.onnx", MLP), tmp_path / "e", progress=False)
    assert trt_api.load("tensorrt-rtx").log.first_error() is None


# Cancelling


def test_ctrl_c_cancels_a_real_build_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "mlp.onnx", MLP)
    make, once, answers = trt_progress._monitor, threading.Lock(), []
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # test runners may ignore it

    def interrupting(module: Any, bar: Any, cancelled: threading.Event) -> Any:
        monitor = make(module, bar, cancelled)
        step = monitor.step_complete

        def interrupted(_: Any, phase_name: str, number: int) -> bool:
            if once.acquire(blocking=False):  # TensorRT calls from several threads
                signal.raise_signal(signal.SIGINT)
                assert cancelled.wait(120)  # until the main thread has caught it
            answers.append(step(phase_name, number))
            return bool(answers[-1])

        type(monitor).step_complete = interrupted
        return monitor

    monkeypatch.setattr(trt_progress, "_monitor", interrupting)
    try:
        with pytest.raises(KeyboardInterrupt):
            build_engine(path, tmp_path / "mlp.engine", progress=False)
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert False in answers
    assert any("cancel" in m.lower() for _, m in trt_api.load("tensorrt-rtx").log.messages)
    assert [p.name for p in tmp_path.iterdir()] == ["mlp.onnx"]
    monkeypatch.setattr(trt_progress, "_monitor", make)
    build_engine(path, tmp_path / "mlp.engine", progress=False)
