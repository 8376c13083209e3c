"""Several ONNX graphs of one model over one file of weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir import external_data

__all__ = ["INLINE_BELOW", "save_shared"]

INLINE_BELOW = 1024  # bytes: shapes and other small constants stay in the graphs


def save_shared(graphs: Mapping[str, ir.Model], folder: Path, weights: str) -> None:
    """Save graphs under their file names, with every large constant in the file ``weights``, each kept once.

    >>> import tempfile; folder = Path(tempfile.mkdtemp())
    >>> empty = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 18}), ir_version=10)
    >>> save_shared({"a.onnx": empty}, folder, "weights.bin"); (folder / "a.onnx").exists()
    True
    """
    values = [v for g in graphs.values() for v in _constants(g)]
    kept: dict[Any, ir.TensorProtocol] = {}
    for value in values:
        kept.setdefault(_content(value.const_value), value.const_value)  # type: ignore[arg-type]
    moved = external_data.convert_tensors_to_external(list(kept.values()), folder, weights)
    by_content = dict(zip(kept, moved, strict=True))
    for value in values:
        value.const_value = by_content[_content(value.const_value)]
    for name, graph in graphs.items():
        ir.save(graph, folder / name)


def _constants(graph: ir.Model) -> Iterable[ir.Value]:
    for value in graph.graph.initializers.values():
        if value.const_value is not None and value.const_value.nbytes >= INLINE_BELOW:
            yield value


def _content(tensor: Any) -> tuple[Any, ...]:
    """What tells two constants apart: their dtype, shape and bytes."""
    if isinstance(tensor, ir.ExternalTensor):
        return (tensor.location, tensor.offset)
    return (tensor.dtype, tuple(tensor.shape), hashlib.sha256(tensor.tobytes()).digest())
