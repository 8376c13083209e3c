"""The backends by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from modpass.errors import InputError
from modpass.exporters.backend import Backend, OnnxRuntimeBackend
from modpass.exporters.onnx_device import OnnxRuntimeCudaBackend
from modpass.exporters.tensorrt_backend import TensorRTBackend

__all__ = ["BACKENDS", "backend_named"]

BACKENDS: dict[str, Callable[[], Backend]] = {
    "onnxruntime": OnnxRuntimeBackend,
    "onnxruntime-cuda": OnnxRuntimeCudaBackend,
    "tensorrt-rtx": partial(TensorRTBackend, "tensorrt-rtx"),
    "tensorrt": partial(TensorRTBackend, "tensorrt"),
}


def backend_named(name: str) -> Backend:
    """A backend that runs a decoder, by its name.

    Raises:
        InputError: there is none of that name, or no GPU for it.
        MissingExtraError: it needs a package that is not installed.

    >>> type(backend_named("onnxruntime")).__name__
    'OnnxRuntimeBackend'
    """
    if name not in BACKENDS:
        raise InputError(f"backend is {name!r}; it must be one of {', '.join(map(repr, BACKENDS))}")
    return BACKENDS[name]()
