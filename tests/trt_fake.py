"""A module ``tensorrt`` whose engines are run by ONNX Runtime, on the addresses that they are given."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime

from modpass.exporters.manifest import Manifest, manifest_path
from modpass.exporters.onnx_session import type_of
from modpass.files import sha256

CODES = {
    "tensor(float)": "FLOAT", "tensor(float16)": "HALF", "tensor(int64)": "INT64", "tensor(bool)": "BOOL",
}  # fmt: skip


class FakeEngine:
    """As ``ICudaEngine`` and ``IExecutionContext`` in one."""

    def __init__(self, path: Path, capturable: bool | None) -> None:
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.values = {v.name: v for v in (*self.session.get_inputs(), *self.session.get_outputs())}
        self.inputs = {v.name for v in self.session.get_inputs()}
        self.hidden: set[str] = set()  # as TensorRT may leave out what is not needed
        self.addresses: dict[str, int] = {}
        self.streams: list[int] = []
        self.device_memory_size_v2 = 64
        self.refuses: str | None = None
        if capturable is not None:  # TensorRT-RTX alone can tell
            self.is_stream_capturable = lambda stream: capturable

    def create_execution_context(self) -> FakeEngine:
        return self

    @property
    def num_io_tensors(self) -> int:
        return len(self.values.keys() - self.hidden)

    def get_tensor_name(self, i: int) -> str:
        return [n for n in self.values if n not in self.hidden][i]

    def get_tensor_mode(self, name: str) -> str:
        return "input" if name in self.inputs else "output"

    def get_tensor_dtype(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=CODES[self.values[name].type])

    def get_tensor_shape(self, name: str) -> list[int]:
        return list(self.values[name].shape)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return name != self.refuses

    def execute_async_v3(self, stream: int) -> bool:
        self.streams.append(stream)
        binding = self.session.io_binding()
        for name, value in self.values.items():
            if name in self.hidden:
                if name in self.inputs:
                    binding.bind_cpu_input(name, np.zeros(value.shape, type_of(value)))
                continue
            put = binding.bind_input if name in self.inputs else binding.bind_output
            put(name, "cpu", 0, type_of(value), value.shape, self.addresses[name])
        self.session.run_with_iobinding(binding)
        return True


def fake_runtime(
    version: str = "10.9", capturable: bool | None = None, change: Callable[[FakeEngine], None] | None = None
) -> Any:
    """The module; its plans are the paths of ONNX files. ``engines`` are those that were read."""
    module: Any = ModuleType("tensorrt")
    module.__version__, module.engines = version, []
    module.ILogger = type("ILogger", (), {})
    module.Severity = enum.IntEnum("Severity", {"INTERNAL_ERROR": 0, "ERROR": 1})
    module.TensorIOMode = SimpleNamespace(INPUT="input", OUTPUT="output")

    def read(logger: Any, plan: bytes) -> FakeEngine | None:
        if plan.startswith(b"other"):
            logger.log(module.Severity.ERROR, "Error Code 6: the engine was built by another version")
            return None
        engine = FakeEngine(Path(plan.decode().split("\n")[0]), capturable)
        if change is not None:
            change(engine)
        module.engines.append(engine)
        return engine

    module.Runtime = lambda logger: SimpleNamespace(deserialize_cuda_engine=lambda plan: read(logger, plan))
    return module


def fake_build(folder: Path, flavor: str = "tensorrt", capability: str = "8.9", mark: str = "") -> None:
    """Write what ``modpass build`` writes, with plans for the module above."""
    for name in ("prefill", "decode"):
        graph, engine = folder / f"{name}.onnx", folder / f"{name}.engine"
        engine.write_text(f"{graph}\n{mark if name == 'decode' else ''}")
        facts = Manifest.load(manifest_path(graph))
        replace(
            facts, kind="engine", file=engine.name, data=None, flavor=flavor, compute_capabilities=(capability,),
            onnx_sha256=facts.sha256, sha256=sha256(engine), bytes=engine.stat().st_size,
            versions={**facts.versions, "tensorrt": "10.9", "tensorrt_rtx": "10.9"},
        ).save(manifest_path(engine))  # fmt: skip
