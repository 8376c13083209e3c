"""Memory, a stream and CUDA graphs on one device; on a CPU, where tests run it, all is done at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modpass.errors import InputError

__all__ = ["Device", "Layout"]

Call = Callable[[], object]


class Layout(NamedTuple):
    """The shape and dtype of an input or output."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Device:
    """A GPU with one stream on which everything runs in order, or the CPU; ``captures``: it has CUDA graphs.

    Raises:
        InputError: it is a GPU that PyTorch does not see; ``needed_by`` says what wants it.

    >>> Device("cpu").zeros((2,), torch.int64).tolist()
    [0, 0]
    """

    def __init__(self, name: str, needed_by: str = "this") -> None:
        self.torch = torch.device(name)
        self.is_gpu = self.captures = self.torch.type == "cuda"
        if self.is_gpu and not torch.cuda.is_available():
            raise InputError(
                f"{needed_by} needs an NVIDIA GPU, and PyTorch {torch.__version__} sees none; use the backend "
                f"'onnxruntime', or install a PyTorch for CUDA"
            )
        self.stream: Any = torch.cuda.Stream(self.torch) if self.is_gpu else None

    @property
    def handle(self) -> int:
        """The stream, as TensorRT and ONNX Runtime take it; 0 on the CPU."""
        return int(self.stream.cuda_stream) if self.is_gpu else 0

    @property
    def capability(self) -> str | None:
        """The compute capability, such as ``"8.9"``; None on the CPU."""
        return ".".join(map(str, torch.cuda.get_device_capability(self.torch))) if self.is_gpu else None

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the device."""
        return torch.zeros(shape, dtype=dtype, device=self.torch)

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the host that the GPU copies from and to by itself (pinned)."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self.is_gpu)

    @contextmanager
    def active(self) -> Iterator[None]:
        """What torch does within goes to the stream, and is done at the end."""
        if not self.is_gpu:
            yield
            return
        with torch.cuda.device(self.torch), torch.cuda.stream(self.stream):
            yield
            self.stream.synchronize()

    def capture(self, call: Call) -> Call:
        """A CUDA graph of ``call``, which runs once before; on the CPU ``call`` itself. Use within ``active``.

        Raises:
            RuntimeError: something in it cannot be captured.
        """
        if not self.is_gpu:
            return call
        call()  # what is set up at the first run must not be captured
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            call()
        return graph.replay
