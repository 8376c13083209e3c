"""Rows of attention that a mask leaves nothing are told by the mask, and zeroed after the product with the values.

torch's decomposition of scaled_dot_product_attention replaces NaN in the probabilities, which reads and writes all
``[B, H, S, S]`` of them twice, a tenth of the time of a small decoder on a CPU, and parts Softmax from MatMul, which
compilers join into one kernel. Here the mask, which has no heads, says once for all layers which rows are empty.

The decomposition also writes a boolean mask as the least float32, under which a row without keys would be the mean of
all values; it becomes -inf, so that the row is zero as in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

__all__ = ["zero_rows_late"]

_OPERATOR = "pkg.torch.onnx.fx_node"
_LEAST = np.finfo(np.float32).min


def zero_rows_late(model: ir.Model) -> int:
    """Turn each ``MatMul(Where(IsNaN(p), 0, p), v)`` with ``p = Softmax(Add(MatMul, bias))`` into
    ``Where(IsInf(ReduceMax(bias)), 0, MatMul(p, v))``; returns how many there were.

    Rows that see a key stay as they are, bit for bit, and rows that see none stay zero. A row that is NaN for another
    reason stays NaN, as in PyTorch, where it was turned to zero.

    >>> text = '''<ir_version: 8, opset_import: ["": 18]> g (float[2, 3] q, float[3, 3] k, float[2, 3] b, float[3, 4] v)
    ... => (float[2, 4] y) <float zero = {0.0}>
    ... {s = MatMul(q, k) m = Add(s, b) p = Softmax(m) n = IsNaN(p) w = Where(n, zero, p) y = MatMul(w, v)}'''
    >>> model = ir.from_onnx_text(text)
    >>> zero_rows_late(model), [n.op_type for n in model.graph]
    (1, ['ReduceMax', 'IsInf', 'MatMul', 'Add', 'Softmax', 'MatMul', 'Where'])
    """
    found = [match for node in model.graph.all_nodes() if (match := _match(node)) is not None]
    empty: dict[tuple[int, ir.Value], ir.Value] = {}
    for match in found:
        bias = _by_infinity(match, model.graph)
        key = id(match.where.graph), bias
        if key not in empty:
            empty[key] = _empty_rows(bias, match, model.graph)
        _move_behind(match, empty[key])
    return len(found)


@dataclass(frozen=True)
class _Match:
    """The Where of the probabilities p, what only it reads, and the Add of scores and bias, the latter at ``place``."""

    where: ir.Node
    is_nan: ir.Node
    zero: ir.Value
    p: ir.Value
    product: ir.Node
    add: ir.Node
    place: int


def _match(where: ir.Node) -> _Match | None:
    """The pattern around a Where, or None where anything else would change with it."""
    if where.op_type != "Where":
        return None
    condition, zero, p = where.inputs
    is_nan, softmax = _producer(condition), _producer(p)
    if is_nan is None or softmax is None or zero is None or p is None:
        return None
    if (is_nan.op_type, softmax.op_type) != ("IsNaN", "Softmax") or is_nan.inputs[0] is not p:
        return None
    last = softmax.attributes.get_int("axis", -1) in (-1, len(p.shape) - 1 if p.shape is not None else -1)
    nothing = zero.const_value is not None and zero.const_value.size == 1 and not zero.const_value.numpy().any()
    product = _only_reader(where.outputs[0])
    if not last or not nothing or _only_reader(is_nan.outputs[0]) is not where or product is None:
        return None
    if product.op_type != "MatMul" or product.inputs[0] is not where.outputs[0]:
        return None
    add = _producer(softmax.inputs[0])
    place = _bias_place(add) if add is not None and add.op_type == "Add" else None
    return None if add is None or place is None else _Match(where, is_nan, zero, p, product, add, place)


def _bias_place(add: ir.Node) -> int | None:
    """Which input of the Add is the bias: the one that is no product of queries and keys."""
    made = [p is not None and p.op_type == "MatMul" for p in map(_producer, add.inputs)]
    return made.index(False) if made.count(True) == 1 else None


def _producer(value: ir.Value | None) -> ir.Node | None:
    return value.producer() if value is not None else None


def _only_reader(value: ir.Value) -> ir.Node | None:
    """The one node of the same graph that reads a value that nothing else does."""
    readers = [use.node for use in value.uses()]
    if value.is_graph_output() or len(readers) != 1 or readers[0].graph is not value.graph:
        return None
    return readers[0]


def _by_infinity(match: _Match, root: ir.Graph) -> ir.Value:
    """The bias, with -inf in place of the least float32 where the operator made it of a boolean mask.

    A model that writes such a bias itself means the least float32, under which an empty row is a mean.
    """
    bias = match.add.inputs[match.place]
    assert bias is not None
    choice = bias.producer()
    low = choice.inputs[2] if choice is not None and choice.op_type == "Where" else None
    if choice is None or low is None or low.const_value is None or _made_from(choice) != _made_from(match.where):
        return bias
    least = low.const_value.numpy()
    if least.dtype == np.float32 and least.size == 1 and least.item() == _LEAST:
        choice.replace_input_with(2, _constant(root, "-inf", np.full_like(least, -np.inf)))
        if not low.uses():
            root.initializers.pop(str(low.name), None)
    return bias


def _made_from(node: ir.Node) -> str | None:
    """The operator of the model that a node is part of."""
    return node.metadata_props.get(_OPERATOR)


def _empty_rows(bias: ir.Value, match: _Match, root: ir.Graph) -> ir.Value:
    """Which rows of the bias are -inf throughout, ``[..., S, 1]``; made before its first reader in this graph."""
    graph = match.where.graph
    assert graph is not None
    most = ir.node("ReduceMax", [bias, _constant(root, "axis", np.array([-1]))], {"keepdims": 1})
    rows = ir.node("IsInf", [most.outputs[0]], {"detect_negative": 1, "detect_positive": 0})
    for node, kind in ((most, bias.type), (rows, ir.TensorType(ir.DataType.BOOL))):
        node.name = f"{match.where.outputs[0].name}.{node.op_type}"  # of the first that reads it, so of no other
        node.outputs[0].name, node.outputs[0].type = f"{node.name}.out", kind
        node.outputs[0].shape = None if bias.shape is None else ir.Shape([*bias.shape[:-1], 1])
        node.metadata_props.update(match.where.metadata_props)
    source = bias.producer()
    if source is not None and source.graph is graph:
        graph.insert_after(source, (most, rows))
    else:
        graph.insert_before(graph[0], (most, rows))
    return rows.outputs[0]


def _move_behind(match: _Match, empty: ir.Value) -> None:
    where, product = match.where, match.product
    graph, output = product.graph, product.outputs[0]
    assert graph is not None
    product.replace_input_with(0, match.p)
    rows = ir.node("Where", [empty, match.zero, output], name=f"{where.outputs[0].name}.rows")
    rows.metadata_props.update(where.metadata_props)
    made = rows.outputs[0]
    made.name, made.type, made.shape = f"{rows.name}.out", output.type, output.shape
    for use in [u for u in output.uses() if u.node is not rows]:
        use.node.replace_input_with(use.idx, made)
    for i, value in enumerate(graph.outputs):
        if value is output:
            graph.outputs[i] = made
            made.name, output.name = output.name, f"{output.name}.rows"
    graph.insert_after(product, rows)
    graph.remove([where, match.is_nan], safe=True)


def _constant(root: ir.Graph, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
    """An initializer, made once."""
    name = f"masked_rows.{name}.{array.ndim}"
    if name not in root.initializers:
        tensor = ir.Tensor(array, name=name)
        root.initializers[name] = ir.Value(
            name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
        )
    return root.initializers[name]
