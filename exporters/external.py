"""Where the weights of an ONNX graph lie: inside its file, or in files of the same folder and nowhere else."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from modpass.errors import VerificationError
from modpass.exporters.within import within

__all__ = ["check_external", "external_files", "read_graph"]


def read_graph(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """The graph of an ONNX file, without the weights that lie elsewhere.

    Raises:
        VerificationError: it cannot be read, or holds no graph.
    """
    try:
        model = onnx.load(os.fspath(path), load_external_data=False)
    except (OSError, DecodeError, ValueError) as e:
        said = " ".join(str(e).split())
        raise VerificationError(f"'{path}' cannot be read as an ONNX model: {said}; export it again") from e
    if not model.graph.node:
        raise VerificationError(f"'{path}' holds no ONNX graph; export it again")
    return model


def external_files(model: onnx.ModelProto, path: str | os.PathLike[str]) -> dict[str, int]:
    """The files that tensors of the graph at ``path`` lie in, and how many bytes of each are read at least.

    Raises:
        VerificationError: a tensor leads out of the folder, or its place in the file makes no sense.
    """
    found: dict[str, int] = {}
    for tensor in _tensors(model.graph, model.functions):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        name, end = _place(tensor, path)
        within(Path(path).parent, name, f"tensor '{tensor.name}' of '{path}'")
        found[name] = max(found.get(name, 0), end)
    return found


def check_external(path: str | os.PathLike[str], model: onnx.ModelProto | None = None) -> dict[str, int]:
    """Make sure that a graph reads no byte outside its folder or behind the end of a file; its files and their sizes.

    model: what ``read_graph`` made of it, where that was done.

    Raises:
        VerificationError: it does, or a file is missing.
    """
    files = external_files(model if model is not None else read_graph(path), path)
    for name, end in files.items():
        file = Path(path).parent / name
        if not file.is_file():
            raise VerificationError(f"'{file}', which '{path}' reads its weights from, is missing; export it again")
        if file.stat().st_size < end:
            raise VerificationError(
                f"'{path}' reads {end} bytes of '{file}', which has {file.stat().st_size}; export it again"
            )
    return files


def _place(tensor: onnx.TensorProto, path: str | os.PathLike[str]) -> tuple[str, int]:
    """File of an external tensor, and the byte behind its last one."""
    entries = {e.key: e.value for e in tensor.external_data}
    try:
        offset = int(entries.get("offset", "0"))
        wanted = _bytes(tensor)
        length = int(entries.get("length", str(wanted)))
    except (ValueError, KeyError, TypeError) as e:
        raise VerificationError(f"tensor '{tensor.name}' of '{path}' has no sound place: {e}; export it again") from e
    if offset < 0 or length != wanted:
        raise VerificationError(
            f"tensor '{tensor.name}' of '{path}' is said to take {length} bytes from byte {offset} on; its shape "
            f"takes {wanted}; export it again"
        )
    return entries.get("location", ""), offset + length


def _bytes(tensor: onnx.TensorProto) -> int:
    if any(d < 0 for d in tensor.dims):
        raise ValueError(f"its shape is {list(tensor.dims)}")
    count = math.prod(tensor.dims)
    size: int = -(-count * int(_BITS[tensor.data_type]) // 8)
    return size


def _bits() -> dict[int, int]:
    packed = {n: 4 for n in ("INT4", "UINT4", "FLOAT4E2M1")} | {n: 2 for n in ("INT2", "UINT2")}
    found = {}
    for name, number in onnx.TensorProto.DataType.items():
        if name in packed:
            found[number] = packed[name]
        elif name not in ("UNDEFINED", "STRING"):
            found[number] = onnx.helper.tensor_dtype_to_np_dtype(number).itemsize * 8
    return found


_BITS = _bits()


def _tensors(
    graph: onnx.GraphProto, functions: Iterator[onnx.FunctionProto] | list[onnx.FunctionProto]
) -> Iterator[onnx.TensorProto]:
    """Every constant of a graph, of the graphs within its nodes, and of functions."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in (*graph.node, *(n for f in functions for n in f.node)):
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner, [])
