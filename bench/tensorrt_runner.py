"""TensorRT and TensorRT-RTX: build an engine for this machine's GPU and run it on torch's memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modpass import RoutedModel
from modpass.bench.exported import onnx_file
from modpass.bench.hardware import no_gpu
from modpass.bench.measuring import Call
from modpass.errors import BuildError
from modpass.exporters import build_engine, trt_api
from modpass.exporters.engine import Engine
from modpass.exporters.plan import checked_plan

__all__ = ["EngineCall", "TensorRTRunner"]


@dataclass(frozen=True)
class TensorRTRunner:
    """One flavour of TensorRT: ``"tensorrt"`` or ``"tensorrt-rtx"``."""

    name: str
    device: str = "cuda"

    def available(self) -> str | None:
        """It needs a GPU and its Python package.

        >>> TensorRTRunner("tensorrt").available() if not torch.cuda.is_available() else "no NVIDIA GPU"
        'no NVIDIA GPU'
        """
        flavor = trt_api.FLAVORS[self.name]
        if no_gpu() or importlib.util.find_spec(flavor.module):
            return no_gpu()
        return f"{flavor.title} is not installed; pip install 'modpass[{flavor.extra}]'"

    def prepare(self, model: RoutedModel, inputs: Mapping[str, Tensor], workdir: Path) -> Call:
        """Export once, build the engine, bind its inputs and outputs.

        Raises:
            ExportError: the model cannot be exported.
            BuildError: TensorRT refuses the file, or the engine.
        """
        engine = workdir / f"{self.name}.engine"
        build_engine(onnx_file(model, inputs, workdir), engine, flavor=self.name, compute_capability=_capability())
        return EngineCall(trt_api.load(self.name), engine, inputs)

    def peak_bytes(self, call: Call) -> int | None:
        """The scratch memory that the engine was given for its intermediate tensors."""
        return call.scratch_bytes if isinstance(call, EngineCall) else None


class EngineCall:
    """An engine with every input and output bound; calling it runs it once, asynchronously.

    Raises:
        ModpassError: the engine is not whole, or not for this GPU or version, or has an input that is not given.
    """

    def __init__(self, tensorrt: trt_api.TensorRT, path: Path, inputs: Mapping[str, Tensor]) -> None:
        self._engine = Engine(tensorrt, checked_plan(path, tensorrt, _capability()))
        self._stream = torch.cuda.Stream()
        self.tensors = memory(self._engine, inputs, "cuda")
        self._engine.bind(self.tensors)
        torch.cuda.synchronize()

    @property
    def scratch_bytes(self) -> int:
        """Device memory for intermediate tensors, in bytes."""
        return self._engine.scratch_bytes

    def __call__(self) -> dict[str, Tensor]:
        """Enqueue one run; the tensors hold its result once the device is synchronised."""
        self._engine.run(self._stream.cuda_stream)
        return self.tensors


def _capability() -> str:
    return ".".join(map(str, torch.cuda.get_device_capability()))


def memory(engine: Engine, inputs: Mapping[str, Tensor], device: str) -> dict[str, Tensor]:
    """A tensor on ``device`` for every input and output of an engine; outputs come empty.

    Raises:
        BuildError: the engine has an input that is not given.
    """
    missing = [n for n in engine.inputs if n not in inputs]
    if missing:
        raise BuildError(f"the engine has the input '{missing[0]}', which is not given: {', '.join(inputs)}")
    found = {n: inputs[n].to(device, layout.dtype).contiguous() for n, layout in engine.inputs.items()}
    return found | {n: torch.empty(s, dtype=d, device=device) for n, (s, d) in engine.outputs.items()}
