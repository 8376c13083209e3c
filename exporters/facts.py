"""What a manifest says of an ONNX graph, but for its file: inputs, outputs, dtype, and how each block chooses."""

from __future__ import annotations

import logging
from typing import Any

import onnx_ir as ir

from modpass.bisect import TOPK_LIMIT, beyond_topk
from modpass.exporters.manifest import RoutedSpec, TensorSpec, versions
from modpass.exporters.shapes import FixedShape
from modpass.exporters.static_graph import values
from modpass.model import RoutedModel
from modpass.routing import RoutedBlock

__all__ = ["facts", "specs", "weights_dtype"]

_LOG = logging.getLogger(__name__)


def facts(model: RoutedModel, graph: ir.Model, shape: FixedShape, indices: dict[str, str]) -> dict[str, Any]:
    """What a manifest says of a graph of ``as_onnx``, but for the file."""
    chosen = {str(v.name): v for v in values(graph) if v.name in set(indices.values())}
    blocks = {}
    for name, block in model.routed_blocks.items():
        k = int(chosen[indices[name]].shape[1])  # type: ignore[index,arg-type]
        blocks[name] = RoutedSpec(
            block.capacity,
            _sequence(block, k, shape),
            k,
            block.gate,
            block.selection,
            indices[name],
            _selector(block, k),
        )
    return {
        "opset": graph.opset_imports[""],
        "dtype": weights_dtype(graph),
        "inputs": specs(graph.graph.inputs),
        "outputs": specs(graph.graph.outputs),
        "routed_blocks": blocks,
        "settings": model.settings,
        "shape": {"batch": shape.batch, "sequence": shape.sequence, "dims": dict(shape.dims)},
        "versions": versions(),
    }


def _selector(block: RoutedBlock, k: int) -> str | None:
    """How the graph finds the k tokens; causal selection has nothing to find, each token decides for itself."""
    if block.selection != "expert_choice":
        return None
    if not beyond_topk(k):
        return "topk"
    _LOG.info("block '%s' selects k=%d tokens, TensorRT's TopK at most %d: exported as a bisection, which chooses "
              "the same", block.name, k, TOPK_LIMIT)  # fmt: skip
    return "bisection"


def _sequence(block: Any, k: int, shape: FixedShape) -> int:
    """The sequence a block runs over: the given one, or the one with this k where it follows from other sizes."""
    if shape.sequence is not None and block.slots(shape.sequence) == k:
        return shape.sequence
    return next((s for s in shape.dims.values() if block.slots(s) == k), round(k / block.capacity))


def specs(found: Any) -> tuple[TensorSpec, ...]:
    """Name, shape and dtype of each graph input or output."""
    return tuple(
        TensorSpec(
            str(v.name),
            tuple(int(d) for d in v.shape),
            v.dtype.name.lower().replace("float", "float32") if v.dtype == ir.DataType.FLOAT else v.dtype.name.lower(),
        )
        for v in found
    )


def weights_dtype(graph: ir.Model) -> str:
    """The dtype of the weights: of most bytes among the floating initializers."""
    sizes: dict[str, int] = {}
    for value in graph.graph.initializers.values():
        if value.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            name = "float32" if value.dtype == ir.DataType.FLOAT else value.dtype.name.lower()
            sizes[name] = sizes.get(name, 0) + (value.const_value.nbytes if value.const_value is not None else 0)
    return max(sizes, key=lambda n: sizes[n]) if sizes else "float32"
