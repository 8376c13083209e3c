"""Which nodes of a graph stay float32 when the rest becomes half precision.

1. The router and the TopK it feeds, because half-precision scores choose other tokens;
2. "norms": statistics of norms (powers, sums, roots), because squares overflow and eps underflows in half precision;
3. "tables": what is computed from positions and masks alone (rotary tables, buckets), because half precision cannot
   count that far;
4. operators whose ONNX type constraint has no such half type;
5. "softmax", where asked for: softmaxes are fused with attention in half precision, and keep their range there.

1 and 4 always hold; which of the named groups a model needs can be measured (`measured.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import onnx
import onnx_ir as ir

__all__ = ["GROUPS", "RULE", "find_islands", "is_constant", "is_float", "module_scopes", "paired", "schema_of"]

_REDUCE = {
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd",
    "ReduceSum", "ReduceSumSquare",
}  # fmt: skip
_STATISTIC = _REDUCE | {"CumSum", "Exp", "Log", "Pow", "Range", "Reciprocal", "Sqrt"}
_PERIODIC = {"Cos", "Sin"}
_ARITHMETIC = {
    "Abs", "Add", "Cast", "Ceil", "Clip", "Div", "Equal", "Floor", "Greater", "GreaterOrEqual",
    "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Round", "Sigmoid", "Sign", "Sub",
    "Sum", "Tanh", "Where",
}  # fmt: skip
_MOVEMENT = {
    "Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Pad", "Reshape",
    "Slice", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze",
}  # fmt: skip
_SOFTMAX = {"LogSoftmax", "Softmax"}
GROUPS = ("norms", "tables", "softmax")
RULE = ("norms", "tables")
_PRODUCT = {"Einsum", "Gemm", "MatMul"}
_CHOICE = {"And", "IsInf", "IsNaN", "LogSoftmax", "Not", "Or", "ScatterElements", "Softmax", "TopK"}
_CONTROL = {"If", "Loop", "Scan"}


def find_islands(
    model: ir.Model,
    half: ir.DataType,
    modules: Collection[str],
    choices: Collection[str] = (),
    groups: Collection[str] = RULE,
) -> set[ir.Node]:
    """The nodes of a float32 ``model`` that compute in float32 when the model becomes ``half``.

    Nodes recorded inside a torch module named in ``modules`` are among them, and those that compute the values
    named in ``choices`` from scores, and the ``groups``.

    >>> text = '<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) {y = Sqrt(x)}'
    >>> [n.op_type for n in find_islands(ir.from_onnx_text(text), ir.DataType.FLOAT16, ())]
    ['Sqrt']
    """
    nodes = [n for n in model.graph.all_nodes() if n.op_type not in _CONTROL]
    grouped = (_STATISTIC if "norms" in groups else set()) | (_SOFTMAX if "softmax" in groups else set())
    islands = {n for n in nodes if _touches_float(n) and (n.op_type in grouped or _must(n, half, model, modules))}
    chosen = [v for n in nodes for v in n.outputs if v.name in choices]
    islands |= _deciding([*chosen, *(n.outputs[1] for n in nodes if n.op_type == "TopK" and is_float(n.inputs[0]))])
    islands |= _tables(nodes) if "tables" in groups else set()
    return _close(nodes, islands)


def _must(node: ir.Node, half: ir.DataType, model: ir.Model, modules: Collection[str]) -> bool:
    inside = any(part in modules for scope in module_scopes(node) for part in scope.split("."))
    return inside or not _allows(node, half, model)


def _deciding(values: list[ir.Value]) -> set[ir.Node]:
    """The nodes that compute these values, back to the reduction or product over the stream that scores it."""
    pending, found = list(values), set()
    while pending:
        node = pending.pop().producer()
        if (
            node is None
            or node in found
            or node.op_type not in _PRODUCT | _ARITHMETIC | _MOVEMENT | _STATISTIC | _CHOICE
        ):
            continue
        found.add(node)
        source = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        counts = source is not None and source.op_type == "Cast" and not is_float(source.inputs[0])
        if node.op_type in _REDUCE and not counts:
            found |= {source} if source is not None and source.op_type in _ARITHMETIC else set()
        elif node.op_type not in _PRODUCT:
            pending += [v for v in node.inputs if v is not None]
    return {n for n in found if _touches_float(n)}


def _tables(nodes: list[ir.Node]) -> set[ir.Node]:
    """What is computed from integers and constants alone. Products count only on the way to Sin or Cos."""
    wide = _from_integers(nodes, lambda n: n.op_type in _ARITHMETIC | _MOVEMENT | _STATISTIC | _PERIODIC | _PRODUCT)
    angles: set[ir.Node] = set()
    pending = [n for n in wide if n.op_type in _PERIODIC]
    while pending:
        node = pending.pop()
        if node in wide and node not in angles:
            angles.add(node)
            pending += [p for v in _floats(node.inputs) if (p := v.producer()) is not None]
    narrow = _from_integers(nodes, lambda n: n in angles or (n in wide and n.op_type not in _PRODUCT))
    return angles | {n for n in narrow if n.op_type not in _MOVEMENT}


def _from_integers(nodes: list[ir.Node], allowed: Callable[[ir.Node], bool]) -> set[ir.Node]:
    found: set[ir.Node] = set()
    for node in nodes:
        if not allowed(node) or not _floats(node.outputs):
            continue
        if not _is_embedding(node) and all(is_constant(v) or v.producer() in found for v in _floats(node.inputs)):
            found.add(node)
    return found


def _is_embedding(node: ir.Node) -> bool:
    """Rows of a weight picked by integers are the stream, not a table."""
    return node.op_type in ("Gather", "GatherND", "GatherElements") and is_constant(node.inputs[0])


def _close(nodes: list[ir.Node], islands: set[ir.Node]) -> set[ir.Node]:
    """Grow islands until no cast is needless and no square of the stream is left in half precision."""
    while True:
        grown = {n for n in nodes if n not in islands and _touches_float(n) and _belongs(n, islands)}
        if not grown:
            return islands
        islands |= grown


def _belongs(node: ir.Node, islands: set[ir.Node]) -> bool:
    sources = [v for v in _floats(node.inputs) if not is_constant(v)]
    readers = [r for v in _floats(node.outputs) for r in v.consumers()]
    from_islands = bool(sources) and all(v.producer() in islands for v in sources)
    to_islands = bool(readers) and all(r in islands for r in readers)
    if any(v.is_graph_output() for v in _floats(node.outputs)):
        to_islands = False
    if node.op_type in _MOVEMENT:
        free = from_islands or (not sources and not _is_embedding(node))
        return free and any(r in islands for r in readers)
    if node.op_type in _ARITHMETIC - {"Cast"}:
        return from_islands or (to_islands and any(r.op_type in _STATISTIC for r in readers))
    return False


def module_scopes(node: ir.Node) -> tuple[str, ...]:
    """The torch modules around a node, outermost first, as the exporter recorded them; empty if it did not.

    >>> scopes = {"pkg.torch.onnx.name_scopes": "['', 'layers.0', 'layers.0.mlp', 'linear_3']"}
    >>> module_scopes(ir.node("MatMul", [], metadata_props=scopes))
    ('layers.0', 'layers.0.mlp')
    """
    recorded = node.metadata_props.get("pkg.torch.onnx.name_scopes")
    if recorded is not None:
        return tuple(s for s in ast.literal_eval(recorded)[:-1] if s)
    parts = node.metadata_props.get("namespace", "").split("/")[:-1]
    return tuple(s for part in parts if (s := part.partition(":")[0].strip()))


def _allows(node: ir.Node, half: ir.DataType, model: ir.Model) -> bool:
    """Whether the operator's schema has the half type wherever the node has float32."""
    schema = schema_of(node, model)
    if schema is None:
        return False
    name = f"tensor({half.numpy()!s})"
    return all(
        slot is None or slot.type_str == "tensor(float)" or name in slot.types
        for values, slots in ((node.inputs, schema.inputs), (node.outputs, schema.outputs))
        for value, slot in paired(values, slots)
        if is_float(value)
    )


def schema_of(node: ir.Node, model: ir.Model) -> Any:
    """The operator's ONNX schema at the model's opset, or None for an operator that ONNX does not define.

    >>> model = ir.from_onnx_text('<ir_version: 8, opset_import: ["": 18]> g () => () {}')
    >>> schema_of(ir.node("TopK", []), model).since_version
    11
    """
    version = model.opset_imports.get(node.domain, 1)
    try:
        return onnx.defs.get_schema(node.op_type, max_inclusive_version=version, domain=node.domain)
    except onnx.defs.SchemaError:
        return None


def paired(values: Sequence[ir.Value | None], slots: Any) -> Iterator[tuple[ir.Value | None, Any]]:
    """Values with their formal parameters; the last parameter of a variadic operator repeats.

    >>> [slot for _, slot in paired([None, None, None], ["data", "rest"])]
    ['data', 'rest', 'rest']
    """
    for i, value in enumerate(values):
        yield value, slots[min(i, len(slots) - 1)] if slots else None


def is_float(value: ir.Value | None) -> bool:
    """Whether the value is there and is float32.

    >>> is_float(ir.val("x", ir.DataType.FLOAT))
    True
    """
    return value is not None and value.dtype == ir.DataType.FLOAT


def _floats(values: Iterable[ir.Value | None]) -> list[ir.Value]:
    return [v for v in values if v is not None and is_float(v)]


def _touches_float(node: ir.Node) -> bool:
    return any(is_float(v) for v in (*node.inputs, *node.outputs))


def is_constant(value: ir.Value | None) -> bool:
    """Whether the value is there and is a weight or another initializer.

    >>> is_constant(ir.val("x", ir.DataType.FLOAT))
    False
    """
    return value is not None and value.const_value is not None
