"""Rotary positions for all tokens but the first few (class tokens, registers), said without cutting the sequence.

``cat([x[:c], f(x[c:], table)])`` is ``where(place < c, x, f(x, table padded in front))`` if f keeps tokens apart. The
first form takes the sequence at a fixed place, which means nothing for chosen tokens; the second has a mask and a
table that follow them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from modpass.mixing import is_pointwise, name_of
from modpass.symbols import shape_of, traced_value, value_of

__all__ = ["without_prefix_cuts"]

aten = torch.ops.aten
_BY_DIM = {"slice", "select", "cat", "stack", "split", "split_with_sizes", "chunk", "unbind", "narrow"}
_SHAPED = {"view", "reshape", "_unsafe_view"}
_PASSING = {"getitem", "clone", "contiguous", "alias", "detach", "_to_copy", "to"}


@dataclass(frozen=True)
class _Cut:
    """``joined = cat([head, last], dim)``, where head and tail are the parts of ``whole`` before and from ``count``."""

    joined: fx.Node
    whole: fx.Node
    tail: fx.Node
    last: fx.Node
    dim: int
    count: Any
    between: tuple[fx.Node, ...]


def without_prefix_cuts(graph: fx.Graph) -> None:
    """Rewrite every such join of the graph that is understood; leave the others.

    >>> graph = fx.Graph(); without_prefix_cuts(graph); len(graph.nodes)
    0
    """
    for node in [n for n in graph.nodes if name_of(n) in ("cat", "concat", "concatenate")]:
        cut = _cut(node)
        if cut is not None:
            _Rewriter(graph, cut).run()


def _cut(node: fx.Node) -> _Cut | None:
    parts: Any = node.args[0]
    rank = len(shape_of(value_of(node)))
    if len(parts) != 2 or not rank:
        return None
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    dim: int = given % rank
    found = _head(parts[0], dim)
    if found is None or shape_of(value_of(found[0])) != shape_of(value_of(node)):
        return None
    whole, count, tails = found
    for tail in tails:
        between = _between(tail, parts[1], dim)
        if between is not None:
            return _Cut(node, whole, tail, parts[1], dim, count, between)
    return None


def _head(node: fx.Node, dim: int) -> tuple[fx.Node, Any, list[fx.Node]] | None:
    """The tensor of which ``node`` is the beginning along ``dim``, how long it is, and the nodes that are the rest."""
    if name_of(node) == "getitem" and node.args[1] == 0 and name_of(node.args[0]) == "split_with_sizes":  # type: ignore[arg-type]
        split: Any = node.args[0]
        source, sizes, along = (*split.args, 0)[:3]
        if len(sizes) != 2 or along % len(shape_of(value_of(source))) != dim:
            return None
        return source, sizes[0], [u for u in split.users if u.args[1] == 1]
    if name_of(node) != "slice":
        return None
    source, along, start, end, step = _slice(node)
    if along != dim or start not in (0, None) or step != 1:
        return None
    whole = _uncut(source)
    rest = [u for u in node.graph.nodes if name_of(u) == "slice" and _uncut(u.args[0]) is whole]
    return whole, end, [u for u in rest if _slice(u)[1:3] == (dim, end) and _to_the_end(u, whole, dim)]


def _slice(node: fx.Node) -> tuple[Any, int, Any, Any, Any]:
    """A slice's tensor, dim, start, end and step."""
    given: list[Any] = [*node.args, *(None, 0, None, None, 1)[len(node.args) :]]
    source, dim, start, end, step = given
    return source, dim % len(shape_of(value_of(source))), start, end, step


def _uncut(node: Any) -> Any:
    """Past slices that take everything."""
    while name_of(node) == "slice" and shape_of(value_of(node)) == shape_of(value_of(node.args[0])):
        node = node.args[0]
    return node


def _to_the_end(node: fx.Node, whole: fx.Node, dim: int) -> bool:
    end, step = _slice(node)[3:]
    whole_length = shape_of(value_of(whole))[dim]
    return step == 1 and (end is None or (isinstance(end, int) and bool(end >= 2**31 or end == whole_length)))


def _between(tail: fx.Node, last: fx.Node, dim: int) -> tuple[fx.Node, ...] | None:
    """The nodes from ``tail`` to ``last``, in order, if each keeps the places along ``dim`` apart."""
    found: dict[fx.Node, bool] = {tail: True}

    def reaches(node: fx.Node) -> bool:
        if node not in found:
            found[node] = False
            found[node] = any([reaches(a) for a in node.all_input_nodes])
        return found[node]

    if last is tail or not reaches(last):
        return None
    order = [n for n in last.graph.nodes if found.get(n) and n is not tail]
    length = shape_of(value_of(tail))[dim]
    return tuple(order) if all(_is_local(n, dim, length) for n in order) else None


def _is_local(node: fx.Node, dim: int, length: Any) -> bool:
    """Whether ``dim`` of every tensor that it makes still counts the same places."""
    value = value_of(node)
    for one in value if isinstance(value, tuple | list) else [value]:
        if len(shape_of(one)) <= dim or shape_of(one)[dim] != length:
            return False
    name = name_of(node)
    if name in _BY_DIM:
        along = _dim_of(node)
        return along is not None and along > dim
    if name in _SHAPED:
        before, after = shape_of(value_of(node.args[0])), shape_of(value)  # type: ignore[arg-type]
        return before[: dim + 1] == after[: dim + 1]
    return is_pointwise(node) or name in _PASSING


def _dim_of(node: fx.Node) -> int | None:
    schema: Any = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else []
    if "dim" not in names:
        return None
    place = names.index("dim")
    given: Any = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    source: Any = node.args[0]
    rank = len(shape_of(value_of(source[0] if isinstance(source, list | tuple) else source)))
    return int(given % (rank + (name_of(node) == "stack")))


class _Rewriter:
    """Computes f on the whole, and keeps the beginning as it was."""

    def __init__(self, graph: fx.Graph, cut: _Cut) -> None:
        self.graph, self.cut = graph, cut
        self.whole: dict[fx.Node, fx.Node] = {cut.tail: cut.whole}
        self.length = shape_of(value_of(cut.tail))[cut.dim]

    def run(self) -> None:
        cut = self.cut
        with self.graph.inserting_before(cut.joined):
            size = self.graph.call_function(aten.sym_size.int, (cut.whole, cut.dim))
            size.meta["val"] = value_of(cut.whole).shape[cut.dim]  # calling it would make a number of it
            for node in cut.between:
                self.whole[node] = self._copy(node, size)
            device = value_of(cut.whole).device
            place = self.call(aten.arange.default, size, device=device)
            mask = self.call(aten.ge.Scalar, place, cut.count)
            behind = len(shape_of(value_of(cut.whole))) - cut.dim - 1
            mask = self.call(aten.reshape.default, mask, [size, *[1] * behind])
            joined = self.call(aten.where.self, mask, self.whole[cut.last], cut.whole)
        cut.joined.replace_all_uses_with(joined)
        for node in (cut.joined, *reversed(cut.between)):
            if not node.users:
                self.graph.erase_node(node)

    def _copy(self, node: fx.Node, size: fx.Node) -> fx.Node:
        if name_of(node) in _SHAPED:
            source, shape = node.args[0], list(node.args[1])  # type: ignore[arg-type]
            shape[self.cut.dim] = size
            return self.call(node.target, self.whole[source], shape)  # type: ignore[index]
        args: Any = fx.map_arg(node.args, lambda n: self._argument(node, n))
        kwargs: Any = fx.map_arg(node.kwargs, lambda n: self._argument(node, n))
        return self.call(node.target, *args, **kwargs)

    def _argument(self, consumer: fx.Node, node: fx.Node) -> fx.Node:
        """What stands for an input of f: the whole in place of the tail, and tables padded in front."""
        if node in self.whole:
            return self.whole[node]
        shape, out = shape_of(value_of(node)), shape_of(value_of(consumer))
        place = self.cut.dim - (len(out) - len(shape))
        if place < 0 or shape[place] != self.length:
            return node
        pads = [0, 0] * (len(shape) - place - 1) + [self.cut.count, 0]
        return self.call(aten.constant_pad_nd.default, node, pads)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node in the module of the join, with the value that the trace would have recorded."""
        made = self.graph.call_function(target, args, kwargs)
        made.meta = {k: v for k, v in self.cut.joined.meta.items() if k != "val"}
        made.meta["val"] = traced_value(value_of(self.cut.whole).fake_mode, target, args, kwargs)
        return made
