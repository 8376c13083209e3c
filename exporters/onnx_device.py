"""ONNX Runtime on a CUDA GPU, with every input and output bound to memory of torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from modpass.errors import ExportError, MissingExtraError
from modpass.exporters.decoder_manifest import DecoderManifest
from modpass.exporters.device import Device, Layout
from modpass.exporters.device_backend import DeviceBackend
from modpass.exporters.onnx_session import open_session, refuse_bfloat16, type_of

__all__ = ["OnnxRuntimeCudaBackend"]

_CUDA = "CUDAExecutionProvider"


class OnnxRuntimeCudaBackend(DeviceBackend):
    """ONNX Runtime's CUDA provider; caches stay on the GPU and are written there.

    device: ``"cuda"``, ``"cuda:1"``; ``"cpu"`` does the same with the CPU provider, to be tried without a GPU.

    Raises:
        MissingExtraError: this ONNX Runtime has no CUDA provider.
        InputError: there is no GPU.
    """

    def __init__(self, device: str = "cuda") -> None:
        if torch.device(device).type == "cuda" and _CUDA not in onnxruntime.get_available_providers():
            raise MissingExtraError(
                f"backend 'onnxruntime-cuda' needs ONNX Runtime's CUDA provider, which onnxruntime "
                f"{onnxruntime.__version__} does not have; install it in its place: pip uninstall onnxruntime; "
                f"pip install 'modpass[gpu]'"
            )
        super().__init__(Device(device, "backend 'onnxruntime-cuda'"))

    def load(self, folder: Path, name: str, manifest: DecoderManifest) -> _Session:
        """Open a session for one graph.

        Raises:
            ExportError: ONNX Runtime refuses the file or the GPU.
        """
        return _Session(folder / f"{name}.onnx", manifest.dtype, self.device)


class _Session:
    """A session and its binding; see ``Program``."""

    uncapturable = "ONNX Runtime waits for the GPU at the end of a run"

    def __init__(self, path: Path, dtype: str, device: Device) -> None:
        self.device, self.tensors = device, dict[str, Tensor]()
        refuse_bfloat16(path, dtype)
        self.session = open_session(path, providers=_providers(device))
        if device.is_gpu and self.session.get_providers()[0] != _CUDA:
            raise ExportError("ONNX Runtime fell back to the CPU; its CUDA provider could not be loaded")
        self.inputs = {v.name: _layout(v) for v in self.session.get_inputs()}
        self.outputs = {v.name: _layout(v) for v in self.session.get_outputs()}
        self.binding = self.session.io_binding()

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Bind memory by address; it is held as long as the session."""
        self.tensors |= tensors
        kind, number = self.device.torch.type, self.device.torch.index or 0
        types = {v.name: type_of(v) for v in (*self.session.get_inputs(), *self.session.get_outputs())}
        for name, tensor in tensors.items():
            put = self.binding.bind_input if name in self.inputs else self.binding.bind_output
            put(name, kind, number, types[name], list(tensor.shape), tensor.data_ptr())

    def run(self) -> None:
        """Run once over what the memory holds now."""
        self.session.run_with_iobinding(self.binding)


def _providers(device: Device) -> list[Any]:
    if not device.is_gpu:
        return ["CPUExecutionProvider"]
    options = {
        "device_id": str(device.torch.index or 0),
        "user_compute_stream": str(device.handle),
        "use_tf32": "0",  # float32 is what was exported and verified; a step waits for memory, not for products
    }
    return [(_CUDA, options), "CPUExecutionProvider"]


def _layout(value: Any) -> Layout:
    return Layout(tuple(value.shape), torch.from_numpy(np.zeros(0, type_of(value))).dtype)
