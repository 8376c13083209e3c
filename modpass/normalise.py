"""Normalise a trace: no checks, no strides, sizes said by the inputs' sizes, constants worked out."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from modpass.complex import without_complex
from modpass.mixing import name_of
from modpass.prefix import without_prefix_cuts
from modpass.symbols import emit, expr_of, value_of

__all__ = ["drop_dead", "normalise"]

aten = torch.ops.aten
_CHECKS = {
    "_assert_tensor_metadata",
    "_assert_scalar",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
    "_assert_async",
}
_LIKE = {
    "zeros_like": 0,
    "ones_like": 1,
    "full_like": None,
    "new_zeros": 0,
    "new_ones": 1,
    "new_full": None,
    "empty_like": 0,
    "new_empty": 0,
}


def normalise(graph: fx.Graph) -> None:
    """Drop the trace's own checks and strides, and say sizes by the inputs' sizes instead of by inner values."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and name_of(node) in _CHECKS:
            graph.erase_node(node)
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            # Whether a view is enough depends on strides, which depend on the attention kernel of the moment.
            node.target = aten.reshape.default
    without_complex(graph)
    without_prefix_cuts(graph)
    known = _known_sizes(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and name_of(node) in _LIKE:
            _make_full(graph, node, known)
    for node in list(graph.nodes):
        if node.op == "call_function" and name_of(node) == "sym_size" and node.all_input_nodes[0].op != "placeholder":
            _replace_size(graph, node, known)
    _fold_inverse(graph)
    _turn_round(graph)
    drop_dead(graph)


def _turn_round(graph: fx.Graph) -> None:
    """``c - x`` as ``-x + c``, the same number, for integers and a fraction: torch's exporter finds no type for it."""
    for node in [n for n in graph.nodes if n.target is aten.rsub.Scalar and len(n.args) == 2]:
        source, number = node.args
        if isinstance(number, float) and not value_of(source).is_floating_point():
            with graph.inserting_before(node):
                negative = graph.call_function(aten.neg.default, (source,))
            negative.meta = {**node.meta, "val": value_of(source)}
            node.target, node.args = aten.add.Tensor, (negative, number)


def _fold_inverse(graph: fx.Graph) -> None:
    """The inverse error function, which no exporter knows, of a constant: a quantile that a model works out."""
    module: Any = graph.owning_module
    for node in [n for n in graph.nodes if name_of(n) in ("erfinv", "special_erfinv")]:
        constant = _constant(module, node)
        if constant is not None:
            name = f"_{node.name}_constant"
            module.register_buffer(name, constant, persistent=False)
            with graph.inserting_before(node):
                folded = graph.get_attr(name)
            folded.meta = dict(node.meta)
            node.replace_all_uses_with(folded)


def _constant(module: Any, node: fx.Node) -> Any:
    """The value of a node that depends on constants alone, else None."""
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(module)
        return value if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) else None
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    values = {a: _constant(module, a) for a in node.all_input_nodes}
    if any(v is None for v in values.values()):
        return None
    target: Any = node.target
    return target(*fx.map_arg(node.args, values.get), **fx.map_arg(node.kwargs, values.get))


def _known_sizes(graph: fx.Graph) -> dict[sympy.Expr, fx.Node]:
    """A node for each symbol that is the size of an input."""
    known: dict[sympy.Expr, fx.Node] = {}
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    last = inputs[-1] if inputs else None
    for node in inputs:
        value = value_of(node)
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            expr = expr_of(size)
            if expr.is_Symbol and expr not in known:
                assert last is not None
                with graph.inserting_after(last):
                    last = known[expr] = graph.call_function(aten.sym_size.int, (node, dim))
                known[expr].meta["val"] = size
    return known


def _make_full(graph: fx.Graph, node: fx.Node, known: dict[sympy.Expr, fx.Node]) -> None:
    """``ones_like(x)`` takes only x's shape: as ``full(shape)`` it depends on no token."""
    value, constant = value_of(node), _LIKE[name_of(node)]
    fill = node.args[-1] if constant is None else constant
    if not all(expr_of(s).free_symbols <= known.keys() for s in value.shape):
        return
    with graph.inserting_before(node):
        sizes = [_size(graph, s, known) for s in value.shape]
        full = graph.call_function(aten.full.default, (sizes, fill), {"dtype": value.dtype, "device": value.device})
    full.meta = dict(node.meta)
    node.replace_all_uses_with(full)
    graph.erase_node(node)


def _size(graph: fx.Graph, size: Any, known: dict[sympy.Expr, fx.Node]) -> fx.Node | int:
    found = emit(graph, expr_of(size), known)
    if isinstance(found, fx.Node):
        found.meta.setdefault("val", size)
    return found


def _replace_size(graph: fx.Graph, node: fx.Node, known: dict[sympy.Expr, fx.Node]) -> None:
    if not expr_of(value_of(node)).free_symbols <= known.keys():
        return
    with graph.inserting_before(node):
        size = _size(graph, value_of(node), known)
    if isinstance(size, fx.Node):
        node.replace_all_uses_with(size)
    else:
        _inline(node, size)
    graph.erase_node(node)


def _inline(node: fx.Node, constant: int) -> None:
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda n: constant if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: constant if n is node else n)


def drop_dead(graph: fx.Graph) -> None:
    """Erase nodes that nothing reads."""
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
