"""ONNX Runtime sessions: opened in one place, their inputs and outputs, and what they cannot be opened for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from modpass.errors import ExportError, VerificationError
from modpass.exporters.decoder_manifest import Ports
from modpass.exporters.external import check_external, read_graph

__all__ = ["open_session", "ports", "refuse_bfloat16", "type_of"]

_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}


def open_session(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    outputs: Sequence[str] = (),
) -> Any:
    """An ``onnxruntime.InferenceSession`` of a graph that reads no weights from outside of its folder.

    threads: processor threads of an operator; None leaves it to ONNX Runtime. providers: as ONNX Runtime takes them.
    outputs: further values of the graph that the session returns.

    Raises:
        ExportError: ONNX Runtime refuses the file; its own message follows ours.
        VerificationError: it reads weights from elsewhere, or behind the end of a file.

    >>> open_session("nowhere.onnx")
    Traceback (most recent call last):
    modpass.errors.ExportError: ONNX Runtime ... cannot load 'nowhere.onnx': ...
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        source = _with_outputs(path, options, outputs) if Path(path).is_file() else path
        return onnxruntime.InferenceSession(source, options, providers=list(providers))
    except VerificationError:
        raise
    except Exception as e:  # pybind turns every kind of refusal into its own
        raise ExportError(f"ONNX Runtime {onnxruntime.__version__} cannot load '{path}': {e}") from e


def _with_outputs(path: str | os.PathLike[str], options: Any, outputs: Sequence[str]) -> Any:
    """The file if it is sound; where it shall return more, the changed graph, whose weights stay in its folder."""
    model = read_graph(path)
    check_external(path, model)
    if not outputs:
        return path
    model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in outputs)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(Path(path).parent))
    return model.SerializeToString()


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
