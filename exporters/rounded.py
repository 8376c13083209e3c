"""Half precision as a GPU has it, in float32: each result of an operator is rounded, and kept in float32.

ONNX Runtime has few half-precision kernels on a CPU; it computes in float32 instead and drops the roundings in
between, so that a half-precision file shows less of its error there than it will elsewhere.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

__all__ = ["rounded"]

_HALVES = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


def rounded(model: ir.Model) -> ir.Model:
    """Copy a half-precision ``model`` as a float32 one that rounds every value that was half.

    >>> text = '<ir_version: 8, opset_import: ["": 18]> g (float16[2] x) => (float16[2] y) {y = Neg(x)}'
    >>> [n.op_type for n in rounded(ir.from_onnx_text(text)).graph]
    ['Cast', 'Cast', 'Neg', 'Cast', 'Cast']
    """
    copy = model.clone()
    for graph in [copy.graph, *copy.graph.subgraphs()]:
        for value in graph.initializers.values():
            if value.dtype in _HALVES and value.const_value is not None:
                value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
                value.type = ir.TensorType(ir.DataType.FLOAT)
        for value in [*graph.inputs, *(o for n in list(graph) for o in n.outputs)]:
            _round(graph, value)
    for node in copy.graph.all_nodes():
        for name in ("to", "dtype", "output_datatype"):
            if node.attributes.get_int(name, 0) in _HALVES and not str(node.name).startswith("round "):
                node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
        if (filled := node.attributes.get_tensor("value")) is not None and filled.dtype in _HALVES:
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(filled.numpy().astype(np.float32)))
    return copy


def _round(graph: ir.Graph, value: ir.Value) -> None:
    half = value.dtype
    if half not in _HALVES:
        return
    value.type = ir.TensorType(ir.DataType.FLOAT)
    down = ir.node("Cast", [value], {"to": int(half)}, name=f"round {value.name}")
    up = ir.node("Cast", [down.outputs[0]], {"to": int(ir.DataType.FLOAT)}, name=f"widen {value.name}")
    for made, dtype in ((down.outputs[0], half), (up.outputs[0], ir.DataType.FLOAT)):
        made.type, made.shape = ir.TensorType(dtype), value.shape
    down.outputs[0].name, up.outputs[0].name = f"{value.name}.half", f"{value.name}.rounded"
    for node, index in [(u.node, u.idx) for u in value.uses() if u.node is not down]:
        node.replace_input_with(index, up.outputs[0])
    graph.outputs[:] = [up.outputs[0] if o is value else o for o in graph.outputs]
    producer = value.producer()
    if producer is None:
        graph.insert_before(graph[0], [down, up])
    else:
        graph.insert_after(producer, [down, up])
