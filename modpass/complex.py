"""Complex rotary tables in real numbers: a complex tensor becomes a real one with a last dim of two.

No exporter lowers every complex operator, and a gather of the chosen tokens would add one more.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from modpass.symbols import traced_value, value_of

__all__ = ["without_complex"]

aten = torch.ops.aten
_SAME = {
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
}
_BY_DIM = {aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.select.int}
_BY_SHAPE = {aten.view.default, aten.reshape.default, aten.expand.default}
# Casts that change nothing: a table made complex64 again, on the device where it is.
_CASTS = {aten.to.dtype_layout, aten.to.dtype, aten.to.device, aten._to_copy.default}


def without_complex(graph: fx.Graph) -> None:
    """Rewrite every complex value of the graph; leave the graph alone where one of its operators is not known here.

    >>> graph = fx.Graph(); without_complex(graph); len(graph.nodes)
    0
    """
    complex_nodes = [n for n in graph.nodes if _is_complex(n)]
    if complex_nodes and all(map(_is_known, [n for n in graph.nodes if _touches(n)])):
        _Rewriter(graph).run()


def _is_complex(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and value.is_complex()


def _touches(node: fx.Node) -> bool:
    return _is_complex(node) or any(map(_is_complex, node.all_input_nodes))


def _is_known(node: fx.Node) -> bool:
    known = _SAME | _BY_DIM | _BY_SHAPE | set(_MADE) | {aten.mul.Tensor, aten.view_as_real.default}
    if node.op == "get_attr":
        return not isinstance(_attribute(node), torch.nn.Parameter)
    if node.op == "call_function" and node.target in _CASTS:
        return bool(value_of(node).dtype == value_of(node.all_input_nodes[0]).dtype)
    if node.op != "call_function" or node.target not in known:
        return False
    return node.target is not aten.view_as_real.default or not _is_complex(node)


def _attribute(node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


class _Rewriter:
    """Copies each complex node as a real one, at the same place and in the same module."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.real = graph, dict[fx.Node, fx.Node]()

    def run(self) -> None:
        for node in [n for n in self.graph.nodes if _touches(n)]:
            with self.graph.inserting_before(node):
                self.real[node] = self._rewritten(node)
            if not _is_complex(node):
                node.replace_all_uses_with(self.real[node])
        for node in [n for n in reversed(self.graph.nodes) if n in self.real]:
            self.graph.erase_node(node)

    def _rewritten(self, node: fx.Node) -> fx.Node:
        target: Any = node.target
        if node.op == "get_attr":
            return self._table(node)
        if target in _MADE:
            return _MADE[target](self, node)
        if target is aten.mul.Tensor:
            return self._product(node)
        source = self.real[node.args[0]]  # type: ignore[index]
        if target is aten.view_as_real.default or target in _CASTS:
            return source
        rest: list[Any] = list(node.args[1:])
        if target in _BY_DIM and rest and rest[0] < 0:
            rest[0] -= 1  # the last dim is now the pair
        if target in _BY_SHAPE:
            rest[0] = [*rest[0], 2]
        return self.call(node, target, source, *rest)

    def _table(self, node: fx.Node) -> fx.Node:
        """A complex buffer as a real one beside it."""
        module: Any = self.graph.owning_module
        name, value = f"_{node.name}_real", torch.view_as_real(_attribute(node).resolve_conj()).clone()
        module.register_buffer(name, value, persistent=False)
        made = self.graph.get_attr(name)
        made.meta = {**node.meta, "val": traced_value(value_of(node).fake_mode, aten.view_as_real.default, (node,), {})}
        return made

    def _product(self, node: fx.Node) -> fx.Node:
        a, b = (n if isinstance(n, fx.Node) else None for n in node.args[:2])
        pairs = [self.real.get(n) if n is not None else None for n in (a, b)]
        if pairs[0] is None or pairs[1] is None:
            scale: Any = node.args[1] if pairs[0] is not None else node.args[0]
            if isinstance(scale, fx.Node) and isinstance(value_of(scale), Tensor):
                scale = self.call(node, aten.unsqueeze.default, scale, -1)
            return self.call(node, aten.mul.Tensor, pairs[0] or pairs[1], scale)
        (x, y), (u, v) = ([self.call(node, aten.select.int, p, -1, i) for i in (0, 1)] for p in pairs)
        first = self.call(node, aten.sub.Tensor, self._times(node, x, u), self._times(node, y, v))
        second = self.call(node, aten.add.Tensor, self._times(node, x, v), self._times(node, y, u))
        return self.pair(node, first, second)

    def _times(self, node: fx.Node, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.call(node, aten.mul.Tensor, a, b)

    def polar(self, node: fx.Node) -> fx.Node:
        """``aten.polar(size, angle)``."""
        size, angle = node.args
        parts = (self.call(node, f, angle) for f in (aten.cos.default, aten.sin.default))
        return self.pair(node, *(self._times(node, size, part) for part in parts))  # type: ignore[arg-type]

    def pair(self, node: fx.Node, first: Any, second: Any) -> fx.Node:
        """Two real tensors as the parts of a complex one."""
        return self.call(node, aten.stack.default, [first, second], -1)

    def as_is(self, node: fx.Node) -> fx.Node:
        """``aten.view_as_complex(x)`` of a real tensor whose last dim is two."""
        return node.args[0]  # type: ignore[return-value]

    def call(self, node: fx.Node, target: Any, *args: Any) -> fx.Node:
        """A new node in the module of ``node``, with the value that the trace would have recorded."""
        made = self.graph.call_function(target, args)
        made.meta = dict(node.meta)
        made.meta["val"] = traced_value(value_of(node).fake_mode, target, args, {})
        return made


_MADE: dict[Any, Callable[[_Rewriter, fx.Node], fx.Node]] = {
    aten.polar.default: _Rewriter.polar,
    aten.complex.default: lambda self, node: self.pair(node, *node.args),
    aten.view_as_complex.default: _Rewriter.as_is,
}
