"""TensorRT 10 and 11 are both met, by modules of their layout that record what they are asked for."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from modpass.errors import BuildError, InputError
from modpass.exporters import trt_api
from modpass.exporters.tensorrt import build_engine
from tests.onnx_text import MLP, write

# TensorRT 10 and 11, which need a GPU: modules of the same layout that record what they are asked for


def flags(name: str, **values: int) -> Any:
    return enum.IntEnum(name, values)


class FakeBuilder:
    """As in both majors: null pointers become None, nothing raises."""

    def __init__(self, module: Any, logger: Any) -> None:
        self.module, self.logger = module, logger

    def create_network(self, flags: int) -> Any:
        self.module.asked["network"] = flags
        return None if "network" in self.module.broken else SimpleNamespace()

    def create_builder_config(self) -> Any:
        if "config" in self.module.broken:
            return None
        asked, broken = self.module.asked, self.module.broken

        def limit(pool: Any, size: int) -> None:
            asked["workspace"] = (pool.name, size)

        def make_cache(content: bytes) -> Any:
            asked["cache in"] = content
            return None if "cache" in broken else SimpleNamespace(serialize=lambda: b"timings")

        self.config = SimpleNamespace(
            set_memory_pool_limit=limit, create_timing_cache=make_cache,
            set_timing_cache=lambda cache, ignore_mismatch: "mismatch" not in broken,
            set_flag=lambda flag: asked.setdefault("flags", []).append(flag.name),
        )  # fmt: skip
        return self.config

    def build_serialized_network(self, network: Any, config: Any) -> Any:
        self.module.asked["config"] = config
        monitor = config.progress_monitor
        monitor.phase_start("Building engine", None, 2)
        going = [monitor.step_complete("Building engine", i) for i in range(2)]
        monitor.phase_finish("Building engine")
        if "build" in self.module.broken:
            self.logger.log(self.module.Severity.ERROR, "Error Code 10: no implementation for node_y")
        return b"engine" if all(going) and "build" not in self.module.broken else None


def fake(version: str, broken: frozenset[str]) -> Any:
    """A module ``tensorrt`` with the enum layout of a major version."""
    module: Any = ModuleType("tensorrt")
    old = version.startswith("10")
    module.__version__, module.asked, module.broken = version, {}, broken
    module.ILogger = type("ILogger", (), {})
    module.IProgressMonitor = type("IProgressMonitor", (), {})
    module.Severity = flags("Severity", INTERNAL_ERROR=0, ERROR=1, WARNING=2)
    module.MemoryPoolType = flags("MemoryPoolType", WORKSPACE=0)
    module.BuilderFlag = flags("BuilderFlag", REFIT=2, STRIP_PLAN=19 if old else 18)
    module.ProfilingVerbosity = flags("ProfilingVerbosity", LAYER_NAMES_ONLY=0, NONE=1, DETAILED=2)
    creation = {"EXPLICIT_BATCH": 0, "STRONGLY_TYPED": 1, "PREFER_JIT": 2} if old else {"STRONGLY_TYPED": 0}
    module.NetworkDefinitionCreationFlag = flags("NetworkDefinitionCreationFlag", **creation)

    def builder(logger: Any) -> Any:
        if "builder" in broken:
            raise TypeError("pybind11::init(): factory function returned nullptr")
        return FakeBuilder(module, logger)

    error = SimpleNamespace(desc=lambda: "UNSUPPORTED_NODE in node_y", node_name=lambda: "", node_operator=lambda: "")
    parser = SimpleNamespace(
        parse_from_file=lambda path: module.asked.update(path=path) or "parse" not in broken,
        num_errors=1, get_error=lambda i: error,
    )  # fmt: skip
    module.Builder, module.OnnxParser = builder, lambda network, logger: parser
    return module


Install = Callable[..., Any]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a fake TensorRT and a GPU of compute capability 9.0 in place."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(trt_api, "_LOGGERS", {})

    def put(version: str, *broken: str) -> Any:
        module = fake(version, frozenset(broken))
        monkeypatch.setitem(sys.modules, "tensorrt", module)
        return module

    return put  # type: ignore[return-value]


@pytest.mark.parametrize(("version", "bits"), [("10.16.1", 0b10), ("11.4.0", 0b01)])
def test_full_tensorrt_gets_the_strongly_typed_bit_of_its_own_version(
    version: str, bits: int, install: Install, tmp_path: Path
) -> None:
    module = install(version)
    path = write(tmp_path / "mlp.onnx", MLP)
    cache = tmp_path / "timings"
    built = build_engine(
        path, tmp_path / "mlp.engine", "tensorrt", "9.0", optimization_level=3, workspace_bytes=1024,
        timing_cache=cache, progress=False,
    )  # fmt: skip
    assert module.asked["network"] == bits
    assert module.asked["workspace"] == ("WORKSPACE", 1024)
    assert module.asked["config"].builder_optimization_level == 3
    assert not hasattr(module.asked["config"], "num_compute_capabilities")
    assert module.asked["path"] == str(path.resolve())
    assert (module.asked["cache in"], cache.read_bytes()) == (b"", b"timings")
    assert built.versions["tensorrt"] == version
    assert (tmp_path / "mlp.engine").read_bytes() == b"engine"
    build_engine(path, tmp_path / "mlp.engine", "tensorrt", "9.0", timing_cache=cache, progress=False)
    assert module.asked["cache in"] == b"timings"


def test_full_tensorrt_gets_the_flags_of_its_own_version(install: Install, tmp_path: Path) -> None:
    module = install("11.4.0")
    path = write(tmp_path / "m.onnx", MLP)
    built = build_engine(
        path, tmp_path / "e", "tensorrt", "9.0", refit=True, strip_weights=True, profiling_verbosity="detailed",
        progress=False,
    )  # fmt: skip
    assert module.asked["flags"] == ["REFIT", "STRIP_PLAN"]
    assert module.asked["config"].profiling_verbosity == module.ProfilingVerbosity.DETAILED
    assert built.stripped
    module.BuilderFlag = flags("BuilderFlag", REFIT=2)
    with pytest.raises(BuildError, match=r"TensorRT 11\.4\.0 has no builder flag STRIP_PLAN; build without it"):
        build_engine(path, tmp_path / "e", "tensorrt", "9.0", strip_weights=True, progress=False)


def test_full_tensorrt_builds_for_one_target(install: Install, tmp_path: Path) -> None:
    install("11.4.0")
    with pytest.raises(InputError, match=r"for the GPU of this machine alone; compute_capability is 8\.9, 9\.0: give"):
        build_engine(write(tmp_path / "m.onnx", MLP), tmp_path / "e", "tensorrt", ("8.9", "9.0"), progress=False)


def test_a_later_version_without_the_flag_gets_no_flag(install: Install, tmp_path: Path) -> None:
    module = install("12.0.0")
    module.NetworkDefinitionCreationFlag = flags("NetworkDefinitionCreationFlag", PREFER_AOT=2)
    build_engine(write(tmp_path / "m.onnx", MLP), tmp_path / "e", "tensorrt", "9.0", progress=False)
    assert module.asked["network"] == 0


@pytest.mark.parametrize(("broken", "message"), [
    ("builder", r"TensorRT 10\.9 made no builder: it gave no reason; full TensorRT needs an NVIDIA GPU"),
    ("network", "made no network"),
    ("config", "made no builder configuration"),
    ("cache", "made no timing cache"),
    ("mismatch", "made no timing cache for this GPU and version"),
    ("parse", "could not parse .*: UNSUPPORTED_NODE in node_y"),
    ("build", "could not build .* for compute capability 9.0: Error Code 10: no implementation for node_y"),
])  # fmt: skip
def test_each_place_where_tensorrt_gives_none_becomes_our_error(
    broken: str, message: str, install: Install, tmp_path: Path
) -> None:
    install("10.9", broken)
    with pytest.raises(BuildError, match=message):
        build_engine(
            write(tmp_path / "m.onnx", MLP), tmp_path / "e", "tensorrt", "9.0", timing_cache=tmp_path / "t",
            progress=False,
        )  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_full_tensorrt_builds_for_the_present_gpu_only(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("11.4.0")
    path = write(tmp_path / "m.onnx", MLP)
    with pytest.raises(BuildError, match=r"only for the GPU of this machine, which has compute capability 9\.0"):
        build_engine(path, tmp_path / "e", "tensorrt", "8.9", progress=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BuildError, match=r"which cannot be found \(PyTorch sees none\)"):
        build_engine(path, tmp_path / "e", "tensorrt", "8.9", progress=False)


def test_one_logger_serves_all_builds_of_a_process(install: Install) -> None:
    install("11.4.0")
    assert trt_api.load("tensorrt").logger is trt_api.load("tensorrt").logger


def test_the_target_of_rtx_is_set_by_name_and_an_unknown_one_is_named() -> None:
    api = trt_api.load("tensorrt-rtx")
    config = api.config(api.builder())
    api.target(config, ("12.0",))
    assert config.get_compute_capability(0) == api.module.ComputeCapability.SM120
    with pytest.raises(BuildError, match=r"has no compute capability 9\.0; it has SM120, SM121, SM75"):
        api.target(config, ("9.0",))
