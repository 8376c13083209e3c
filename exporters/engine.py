"""A TensorRT engine of either flavour: read, its inputs and outputs, their addresses, a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modpass.errors import BuildError, VerificationError
from modpass.exporters.device import Layout
from modpass.exporters.plan import CheckedPlan
from modpass.exporters.trt_api import TensorRT
from modpass.exporters.trt_refit import put_weights

__all__ = ["Engine"]

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


class Engine:
    """A deserialised engine with one execution context; it takes none but a checked plan.

    An engine that was built without weights takes them from the ONNX file of the same name beside it.

    inputs, outputs: their layouts by name; scratch_bytes: device memory for intermediate tensors.

    Raises:
        BuildError: TensorRT refuses it, or it has a dtype that torch lacks.
        VerificationError: it takes or returns something else than its manifest says.

    Source: TensorRT developer guide, "Performing Inference" of the Python API.
    """

    def __init__(self, tensorrt: TensorRT, plan: CheckedPlan) -> None:
        if not isinstance(plan, CheckedPlan):  # for callers without a type checker: what follows runs the plan
            raise TypeError(f"an engine is made from a CheckedPlan, not from a {type(plan).__name__}")
        self._tensorrt, self._path = tensorrt, plan.path
        tensorrt.log.messages.clear()
        # The runtime must outlive the engine, and the engine its context.
        self._runtime = tensorrt.module.Runtime(tensorrt.logger)
        self._engine = self._made(self._runtime.deserialize_cuda_engine(plan.content), "engine")
        if plan.manifest.stripped:
            put_weights(tensorrt, self._engine, plan, plan.path.with_suffix(".onnx"))
        self._context = self._made(self._engine.create_execution_context(), "execution context")
        self._branches = (
            b"stream_capturable=0" in plan.content
        )  # the plan's own word, where a conditional waits for the GPU
        self._bound: dict[str, Tensor] = {}
        self.inputs: dict[str, Layout] = {}
        self.outputs: dict[str, Layout] = {}
        for name in map(self._engine.get_tensor_name, range(self._engine.num_io_tensors)):
            mode = self._engine.get_tensor_mode(name)
            side = self.inputs if mode == tensorrt.module.TensorIOMode.INPUT else self.outputs
            side[name] = self._layout(name)
        self._compare(plan)

    def _compare(self, plan: CheckedPlan) -> None:
        """What the engine says of itself is what its manifest says; it may leave out an input that nothing reads."""
        said = {s.name: (s.shape, s.dtype) for s in (*plan.manifest.inputs, *plan.manifest.outputs)}
        for name, (shape, dtype) in {**self.inputs, **self.outputs}.items():
            found = (shape, str(dtype).removeprefix("torch."))
            if said.get(name) != found:
                raise VerificationError(
                    f"'{name}' of the engine '{plan.path}' is {list(shape)} of {found[1]}, its manifest says "
                    f"{said.get(name, 'nothing of it')}; build it again"
                )

    def _layout(self, name: str) -> Layout:
        code = self._engine.get_tensor_dtype(name).name
        if code not in _TORCH_DTYPES:
            raise BuildError(f"'{name}' of the engine is {code}, which torch has no tensors of")
        return Layout(tuple(self._engine.get_tensor_shape(name)), _TORCH_DTYPES[code])

    @property
    def scratch_bytes(self) -> int:
        """Device memory for intermediate tensors, in bytes."""
        # TensorRT 10.1 replaced the first by the second, for sizes above 2 GB.
        size = getattr(self._engine, "device_memory_size_v2", None)
        return int(self._engine.device_memory_size if size is None else size)

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Read and write these from now on, at their addresses; they are held as long as the engine.

        Raises:
            BuildError: an input or output is not given, is of another shape or dtype, or TensorRT refuses its address.
        """
        for name, layout in {**self.inputs, **self.outputs}.items():
            tensor = tensors.get(name, self._bound.get(name))
            if tensor is None:
                raise BuildError(f"the engine has '{name}', which is not given: {', '.join(tensors)}")
            if (tuple(tensor.shape), tensor.dtype) != layout or not tensor.is_contiguous():
                raise BuildError(f"'{name}' of the engine is {list(layout.shape)} of {layout.dtype}; given is "
                                 f"{list(tensor.shape)} of {tensor.dtype}")  # fmt: skip
            if not self._context.set_tensor_address(name, tensor.data_ptr()):
                raise BuildError(f"TensorRT refuses the address of '{name}'")
            self._bound[name] = tensor

    def run(self, stream: int) -> None:
        """Put one run on a CUDA stream.

        Raises:
            BuildError: TensorRT refuses.
        """
        if not self._context.execute_async_v3(stream):
            raise BuildError(self._sentence("run"))

    def inspect(self) -> str:
        """What TensorRT's engine inspector tells, as JSON."""
        layout = self._tensorrt.module.LayerInformationFormat.JSON
        return str(self._engine.create_engine_inspector().get_engine_information(layout))

    def uncapturable(self, stream: int) -> str | None:
        """Why a CUDA graph cannot hold a run on this stream; None where nothing is known against it."""
        if self._branches:
            return "the plan has branches, which the host decides; export with skipping='masked' for a CUDA graph"
        asked = getattr(self._context, "is_stream_capturable", None)  # TensorRT-RTX alone
        return None if asked is None or asked(stream) else "TensorRT says that the plan cannot be captured"

    def _made(self, thing: Any, what: str) -> Any:
        if thing is None:
            raise BuildError(self._sentence(what))
        return thing

    def _sentence(self, what: str) -> str:
        said = self._tensorrt.log.first_error() or "it gave no reason"
        return f"{self._tensorrt.flavor.title} {self._tensorrt.version} made no {what} of '{self._path}': {said}"
