"""ONNX Runtime, on a CPU or a CUDA GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor

from modpass import RoutedModel
from modpass.bench.exported import onnx_file
from modpass.bench.hardware import no_gpu
from modpass.bench.measuring import Call, Original
from modpass.bench.memory import device_growth, resident_growth
from modpass.bench.onnx_peers import check_same, optimised, plain_export
from modpass.bench.onnx_profile import block_seconds
from modpass.errors import ExportError, InputError
from modpass.exporters.onnx_session import open_session

__all__ = ["OnnxCpuRunner", "OnnxGpuRunner"]

_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


@dataclass(frozen=True)
class OnnxCpuRunner:
    """ONNX Runtime's CPU provider, with as many threads as torch uses."""

    name: str = "onnxruntime"
    device: str = "cpu"

    def available(self) -> str | None:
        """Always: it is installed with modpass."""
        return None

    def prepare(self, model: RoutedModel, inputs: Mapping[str, Tensor], workdir: Path) -> Call:
        """Export once, open a session.

        Raises:
            InputError: the weights' dtype has no numpy counterpart (bfloat16).
            ExportError: the model cannot be exported, or ONNX Runtime refuses the file.
        """
        session = _session(onnx_file(model, inputs, workdir), [_CPU])
        feeds = _feeds(session, inputs)
        return lambda: session.run(None, feeds)

    def peak_bytes(self, call: Call) -> int | None:
        """What the session's arena takes in its first call."""
        return resident_growth(call)

    def peers(
        self, original: Original, inputs: Mapping[str, Tensor], workdir: Path, dense: Call
    ) -> Mapping[str, Callable[[], Call]]:
        """The plain exporter's file, and the same through ONNX Runtime's own transformer optimiser."""

        def call_of(name: str, path: Path) -> Call:
            session = _session(path, [_CPU])
            feeds = _feeds(session, inputs)
            check_same(name, session.run(None, feeds), dense())
            return lambda: session.run(None, feeds)

        plain, better = "torch.onnx.export", "onnxruntime.transformers"
        return {
            plain: lambda: call_of(plain, plain_export(original, inputs, workdir)),
            better: lambda: call_of(better, optimised(original, plain_export(original, inputs, workdir))),
        }

    def block_seconds(
        self, model: RoutedModel, inputs: Mapping[str, Tensor], workdir: Path, blocks: Collection[str]
    ) -> Mapping[str, float]:
        """Seconds of one call in each block, from ONNX Runtime's profile of the exported file."""
        path = onnx_file(model, inputs, workdir)
        feeds = _feeds(_session(path, [_CPU]), inputs)
        return block_seconds(path, feeds, blocks, threads=torch.get_num_threads())


@dataclass(frozen=True)
class OnnxGpuRunner:
    """One of ONNX Runtime's providers for NVIDIA GPUs, CUDA or TensorRT; inputs and outputs stay on the device."""

    name: str
    provider: str
    device: str = "cuda"

    def available(self) -> str | None:
        """It needs a GPU and the build of ONNX Runtime for it."""
        if self.provider in onnxruntime.get_available_providers():
            return no_gpu()
        return no_gpu() or f"this onnxruntime has no {self.provider}; pip install 'modpass[gpu]' in its place"

    def prepare(self, model: RoutedModel, inputs: Mapping[str, Tensor], workdir: Path) -> Call:
        """Export once, open a session, bind inputs and outputs to device memory.

        Raises:
            InputError: the weights' dtype has no numpy counterpart (bfloat16).
            ExportError: the model cannot be exported, or ONNX Runtime refuses the file or the GPU.
        """
        session = _session(onnx_file(model, inputs, workdir), list(dict.fromkeys([self.provider, _CUDA, _CPU])))
        if session.get_providers()[0] != self.provider:
            raise ExportError(f"ONNX Runtime fell back to another provider; its {self.provider} could not be loaded")
        binding = session.io_binding()
        for name, array in _feeds(session, inputs).items():
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", 0)
            binding.bind_ortvalue_input(name, value)
        for output in session.get_outputs():
            binding.bind_output(output.name, "cuda")

        def call() -> object:
            return session.run_with_iobinding(binding)

        return call

    def peak_bytes(self, call: Call) -> int | None:
        """What the session's arena takes in its first call."""
        return device_growth(call)


def _session(path: Path, providers: list[str]) -> Any:
    return open_session(path, threads=torch.get_num_threads(), providers=providers)


def _feeds(session: Any, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """The inputs that the file still has: one that nothing depends on may be gone."""
    names = [i.name for i in session.get_inputs()]
    for name in names:
        if inputs[name].dtype is torch.bfloat16:
            raise InputError(f"input '{name}' is bfloat16, which ONNX Runtime takes from no numpy array")
    return {name: inputs[name].numpy() for name in names}
