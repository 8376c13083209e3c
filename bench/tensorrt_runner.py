"""TensorRT and TensorRT-RTX: build an engine for this machine's GPU and run it on torch's memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modpass import RoutedModel
from modpass.bench.exported import onnx_file
from modpass.bench.hardware import no_gpu
from modpass.bench.torch_runner import Call
from modpass.errors import BuildError
from modpass.exporters import build_engine, trt_api

__all__ = ["EngineCall", "TensorRTRunner"]

_TORCH_DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT64": torch.int64,
    "INT32": torch.int32,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
    "BOOL": torch.bool,
}


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
        major, minor = torch.cuda.get_device_capability()
        build_engine(onnx_file(model, inputs, workdir), engine, flavor=self.name, compute_capability=f"{major}.{minor}")
        return EngineCall(trt_api.load(self.name), engine, inputs)

    def peak_bytes(self, call: Call) -> int | None:
        """The scratch memory that the engine was given for its intermediate tensors."""
        return call.scratch_bytes if isinstance(call, EngineCall) else None


class EngineCall:
    """A deserialised engine with every input and output bound; calling it runs it once, asynchronously.

    Raises:
        BuildError: the engine is not for this GPU or version, or has an input that is not given.

    Source: TensorRT developer guide, "Performing Inference" of the Python API.
    """

    def __init__(self, tensorrt: trt_api.TensorRT, path: Path, inputs: Mapping[str, Tensor]) -> None:
        self._tensorrt = tensorrt
        # The runtime must outlive the engine, and the engine its context.
        self._runtime = tensorrt.module.Runtime(tensorrt.logger)
        self._engine = self._made(self._runtime.deserialize_cuda_engine(path.read_bytes()), "engine")
        self._context = self._made(self._engine.create_execution_context(), "execution context")
        self._stream = torch.cuda.Stream()
        self.tensors = bind(tensorrt.module, self._engine, self._context, inputs, "cuda")
        torch.cuda.synchronize()

    @property
    def scratch_bytes(self) -> int:
        """Device memory for intermediate tensors, in bytes."""
        # TensorRT 10.1 replaced the first by the second, for sizes above 2 GB.
        size = getattr(self._engine, "device_memory_size_v2", None)
        return int(self._engine.device_memory_size if size is None else size)

    def __call__(self) -> dict[str, Tensor]:
        """Enqueue one run; the tensors hold its result once the device is synchronised."""
        if not self._context.execute_async_v3(self._stream.cuda_stream):
            raise BuildError(self._sentence("run"))
        return self.tensors

    def _made(self, thing: Any, what: str) -> Any:
        if thing is None:
            raise BuildError(self._sentence(what))
        return thing

    def _sentence(self, what: str) -> str:
        said = self._tensorrt.log.first_error() or "it gave no reason"
        return f"{self._tensorrt.flavor.title} {self._tensorrt.version} made no {what}: {said}"


def bind(module: Any, engine: Any, context: Any, inputs: Mapping[str, Tensor], device: str) -> dict[str, Tensor]:
    """Give every input and output of an engine a tensor on ``device``, which the caller must keep alive.

    Raises:
        BuildError: the engine has an input that is not given, a dtype torch lacks, or refuses an address.
    """
    tensors: dict[str, Tensor] = {}
    for name in (engine.get_tensor_name(i) for i in range(engine.num_io_tensors)):
        code = engine.get_tensor_dtype(name).name
        if code not in _TORCH_DTYPES:
            raise BuildError(f"'{name}' of the engine is {code}, which torch has no tensors of")
        if engine.get_tensor_mode(name) != module.TensorIOMode.INPUT:
            shape = tuple(engine.get_tensor_shape(name))
            tensors[name] = torch.empty(shape, dtype=_TORCH_DTYPES[code], device=device)
        elif name in inputs:
            tensors[name] = inputs[name].to(device, _TORCH_DTYPES[code]).contiguous()
        else:
            raise BuildError(f"the engine has the input '{name}', which is not given: {', '.join(inputs)}")
        if not context.set_tensor_address(name, tensors[name].data_ptr()):
            raise BuildError(f"TensorRT refuses the address of '{name}'")
    return tensors
