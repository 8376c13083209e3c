"""ONNX Runtime sessions: opened in one place, their inputs and outputs, and what they cannot be opened for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from modpass.errors import ExportError
from modpass.exporters.decoder_manifest import Ports

__all__ = ["open_session", "ports", "refuse_bfloat16", "type_of"]

_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}


def open_session(
    path: str | os.PathLike[str], *, threads: int | None = None, providers: Sequence[Any] = ("CPUExecutionProvider",)
) -> Any:
    """An ``onnxruntime.InferenceSession``.

    threads: processor threads of an operator; None leaves it to ONNX Runtime. providers: as ONNX Runtime takes them.

    Raises:
        ExportError: ONNX Runtime refuses the file; its own message follows ours.

    >>> open_session("nowhere.onnx")
    Traceback (most recent call last):
    modpass.errors.ExportError: ONNX Runtime ... cannot load 'nowhere.onnx': ...
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(path, options, providers=list(providers))
    except Exception as e:  # pybind turns every kind of refusal into its own
        raise ExportError(f"ONNX Runtime {onnxruntime.__version__} cannot load '{path}': {e}") from e


def refuse_bfloat16(path: Path, dtype: str) -> None:
    """Refuse a graph whose weights are of a dtype that ONNX Runtime does not compute with.

    Raises:
        ExportError: it is bfloat16.

    >>> refuse_bfloat16(Path("decode.onnx"), "bfloat16")
    Traceback (most recent call last):
    modpass.errors.ExportError: 'decode.onnx' is in bfloat16, which ONNX Runtime has no kernels for; export ...
    """
    if dtype == "bfloat16":
        raise ExportError(
            f"'{path}' is in bfloat16, which ONNX Runtime has no kernels for; export with dtype='float32' or "
            f"'float16', or run TensorRT engines of it"
        )


def ports(session: Any) -> Ports:
    """The inputs and outputs of a session."""
    inputs, outputs = ({v.name: tuple(v.shape) for v in vs} for vs in (session.get_inputs(), session.get_outputs()))
    return Ports(inputs, outputs)


def type_of(value: Any) -> Any:
    """The numpy type of an input or output.

    Raises:
        ExportError: numpy has none.
    """
    if value.type not in _TYPES:
        raise ExportError(f"'{value.name}' is {value.type}, which numpy does not have; export in float32 or float16")
    return _TYPES[value.type]
