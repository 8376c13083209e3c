"""Rows of runners that run, that cannot and that fail; TensorRT engines and their memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_decoder import Counting
from torch import Tensor

from modpass.bench import RUNNERS, Plan, Row, Runner, measure, runners_named
from modpass.bench.tensorrt_runner import memory
from modpass.errors import BuildError, InputError, VerificationError
from modpass.exporters import trt_api
from modpass.exporters.engine import Engine
from modpass.exporters.manifest import Manifest, TensorSpec
from modpass.exporters.plan import CheckedPlan

SPECS = Manifest(
    "engine", "m.engine", "00", 18, "float32",
    inputs=(TensorSpec("ids", (1, 3), "int64"), TensorSpec("scale", (1,), "float16")),
    outputs=(TensorSpec("logits", (1, 3, 5), "float32"),),
)  # fmt: skip


def measured(runner: Runner, folder: Path) -> Row:
    models: Any = {"dense": None, "routed": None}
    return measure(runner, models, {}, folder, Plan(warmup=0, repeats=2), lambda *_: None)


class TestMeasure:
    def test_a_runner_that_is_not_available_keeps_its_row_with_the_reason(self, tmp_path: Path) -> None:
        row = measured(Counting(reason="no NVIDIA GPU", error=AssertionError()), tmp_path)
        assert (row.status, row.reason, row.ratio) == ("skipped", "no NVIDIA GPU", None)

    def test_a_runner_that_fails_keeps_its_row_with_the_first_line(self, tmp_path: Path) -> None:
        row = measured(Counting(error=BuildError("\x1b[96mK exceeds 3840\x1b[0m\nand more")), tmp_path)
        assert (row.status, row.reason) == ("failed", "BuildError: K exceeds 3840")

    def test_both_models_are_prepared_in_folders_of_their_own(self, tmp_path: Path) -> None:
        row = measured(Counting(), tmp_path)
        assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("*/*")) == [
            "dense/prepared",
            "routed/prepared",
        ]
        assert row.status == "measured"
        assert row.dense is not None
        assert (len(row.dense.timing.samples), row.dense.peak_bytes) == (2, 7)
        assert row.ratio is not None
        assert row.ratio.value > 1

    def test_on_a_gpu_the_device_is_waited_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        waits: list[None] = []
        monkeypatch.setattr("modpass.bench.measuring.synchronize_gpu", lambda: waits.append(None))
        measured(Counting(device="cpu"), tmp_path)
        assert not waits
        measured(Counting(device="cuda"), tmp_path)
        assert len(waits) == 2 * 2 * 2  # before and after, of two models, in two rounds


class TestRunners:
    def test_all_follow_the_protocol_under_their_own_name(self) -> None:
        assert all(isinstance(r, Runner) and r.name == name for name, r in RUNNERS.items())

    def test_an_unknown_name_is_refused(self) -> None:
        with pytest.raises(InputError, match="no runner is called 'tflite'; there are: torch, torch-c"):
            runners_named(["torch", "tflite"])

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    @pytest.mark.parametrize("name", [n for n, r in RUNNERS.items() if r.device == "cuda"])
    def test_without_a_gpu_the_reason_is_that(self, name: str) -> None:
        assert RUNNERS[name].available() == "no NVIDIA GPU"

    def test_compiling_without_a_compiler_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler")
        assert RUNNERS["torch-compile"].available() == (
            "torch.compile needs a C++ compiler; there is no no-such-compiler"
        )


class FakeEngine:
    """Two inputs and an output, as TensorRT's ``ICudaEngine`` and ``IExecutionContext`` tell of them."""

    tensors: tuple[tuple[str, str, str, tuple[int, ...]], ...] = (
        ("ids", "INPUT", "INT64", (1, 3)),
        ("scale", "INPUT", "HALF", (1,)),
        ("logits", "OUTPUT", "FLOAT", (1, 3, 5)),
    )
    num_io_tensors = 3

    def __init__(self) -> None:
        self.addresses: dict[str, int] = {}

    def create_execution_context(self) -> FakeEngine:
        return self

    def get_tensor_name(self, i: int) -> str:
        return self.tensors[i][0]

    def _of(self, name: str) -> tuple[str, str, str, tuple[int, ...]]:
        return next(t for t in self.tensors if t[0] == name)

    def get_tensor_mode(self, name: str) -> str:
        return self._of(name)[1]

    def get_tensor_dtype(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=self._of(name)[2])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._of(name)[3]

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        return stream == 0


class TestEngine:
    inputs: Mapping[str, Tensor] = {"ids": torch.tensor([[1, 2, 3]]), "scale": torch.ones(1)}

    @pytest.fixture
    def fake(self) -> FakeEngine:
        return FakeEngine()

    @pytest.fixture
    def engine(self, fake: FakeEngine, tmp_path: Path) -> Engine:
        return self.read(fake, tmp_path)

    def read(self, fake: FakeEngine | None, folder: Path) -> Engine:
        runtime = SimpleNamespace(deserialize_cuda_engine=lambda plan: fake)
        module = SimpleNamespace(
            TensorIOMode=SimpleNamespace(INPUT="INPUT"), Runtime=lambda logger: runtime, __version__="10.9"
        )
        plan = CheckedPlan(folder / "m.engine", b"plan", SPECS)
        return Engine(trt_api.TensorRT(trt_api.FLAVORS["tensorrt"], module, None, trt_api.Log()), plan)

    def test_every_tensor_gets_memory_of_its_own_dtype_and_shape(self, engine: Engine, fake: FakeEngine) -> None:
        tensors = memory(engine, self.inputs, "cpu")
        assert {n: t.dtype for n, t in tensors.items()} == {
            "ids": torch.int64,
            "scale": torch.float16,
            "logits": torch.float32,
        }
        assert tensors["logits"].shape == (1, 3, 5)
        engine.bind(tensors)
        assert fake.addresses == {n: t.data_ptr() for n, t in tensors.items()}

    def test_an_input_that_is_not_given_is_named(self, engine: Engine) -> None:
        with pytest.raises(BuildError, match="has the input 'scale', which is not given: ids"):
            memory(engine, {"ids": self.inputs["ids"]}, "cpu")
        with pytest.raises(BuildError, match="has 'scale', which is not given: ids"):
            engine.bind({"ids": self.inputs["ids"]})

    def test_memory_of_another_shape_or_dtype_is_refused(self, engine: Engine) -> None:
        tensors = memory(engine, self.inputs, "cpu")
        with pytest.raises(BuildError, match=r"'ids' of the engine is \[1, 3\] of torch.int64; given is \[1, 2\]"):
            engine.bind({**tensors, "ids": tensors["ids"][:, :2]})
        with pytest.raises(BuildError, match=r"given is \[1\] of torch.float32"):
            engine.bind({**tensors, "scale": torch.ones(1)})

    def test_a_plan_that_is_not_read_or_not_run_is_our_error(self, engine: Engine, tmp_path: Path) -> None:
        with pytest.raises(BuildError, match=r"TensorRT 10.9 made no engine of '.*m.engine': it gave no reason"):
            self.read(None, tmp_path)
        with pytest.raises(BuildError, match="made no run of"):
            engine.run(7)

    def test_a_plan_that_was_not_checked_is_not_read(self, tmp_path: Path) -> None:
        api: Any = SimpleNamespace(module=None)
        with pytest.raises(TypeError, match="an engine is made from a CheckedPlan, not from a PosixPath"):
            Engine(api, tmp_path)  # type: ignore[arg-type]

    def test_an_engine_that_is_not_what_its_manifest_says_is_refused(self, fake: FakeEngine, tmp_path: Path) -> None:
        fake.tensors = (("ids", "INPUT", "INT64", (1, 4)), *fake.tensors[1:])
        with pytest.raises(VerificationError, match=r"'ids' of the engine .* is \[1, 4\] of int64, its manifest says"):
            self.read(fake, tmp_path)
        fake.tensors = (("key", "INPUT", "INT64", (1, 3)), *fake.tensors[1:])
        with pytest.raises(VerificationError, match=r"'key' of .* its manifest says nothing of it"):
            self.read(fake, tmp_path)

    def test_plans_are_deserialised_in_one_place(self) -> None:
        room = Path(__file__).parents[1]
        files = [
            *(room / "exporters").glob("*.py"),
            *(room / "bench").glob("*.py"),
            *(room / "modpass").glob("**/*.py"),
        ]
        found = {f.name for f in files if "deserialize_cuda_engine" in f.read_text()}
        assert found == {"engine.py"}

    def test_a_dtype_that_torch_lacks_is_refused(self, fake: FakeEngine, tmp_path: Path) -> None:
        fake.tensors = (("ids", "INPUT", "INT4", (1, 3)), *fake.tensors[1:])
        with pytest.raises(BuildError, match="'ids' of the engine is INT4, which torch has no tensors of"):
            self.read(fake, tmp_path)

    def test_the_names_it_relies_on_are_those_of_tensorrt(self) -> None:
        trt = pytest.importorskip("tensorrt_rtx")
        for name in ("get_tensor_name", "get_tensor_mode", "get_tensor_dtype", "get_tensor_shape"):
            assert hasattr(trt.ICudaEngine, name)
        assert hasattr(trt.ICudaEngine, "device_memory_size_v2")
        for name in ("set_tensor_address", "execute_async_v3", "is_stream_capturable"):
            assert hasattr(trt.IExecutionContext, name)
        assert hasattr(trt.Runtime, "deserialize_cuda_engine")
        assert {"FLOAT", "HALF", "BF16", "INT64", "INT32", "BOOL"} <= trt.DataType.__members__.keys()
        assert "INPUT" in trt.TensorIOMode.__members__
