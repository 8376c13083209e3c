"""Tokens that are sorted by their experts, and put back: each is computed alone, wherever it lies.

The pairs of a token and one of its experts are sorted by expert and cut into parts, as many pairs each as an expert
has; each part goes through its expert's weights; the results are added up where their tokens lie.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.utils._sympy.symbol import SymT, symbol_is_type

from modpass.mixing import is_pointwise, name_of
from modpass.sizes import Sizes
from modpass.symbols import shape_of, value_of

__all__ = ["sorted_by_expert"]

_SAME = {"to", "_to_copy", "clone", "contiguous", "alias", "detach", "type_as"}
_EMPTY = {"zeros", "full"}


def sorted_by_expert(tokens: Collection[fx.Node], sizes: Sizes) -> set[fx.Node]:
    """The operators that sort tokens by expert, work on them in that order, and put them back."""
    found: set[fx.Node] = set()
    for node in tokens:
        picked = _picked(node, sizes) if name_of(node) == "sort" else None
        if picked is not None:
            group = _Group(sizes, node, int(shape_of(value_of(picked))[1]), _counts(picked))
            found |= group.nodes if group.counts and group.closes(tokens) else set()
    return found


def _picked(sort: fx.Node, sizes: Sizes) -> fx.Node | None:
    """The experts ``[T, m]`` of each token, all of which are sorted together from the least."""
    key: Any = sort.args[0]
    plain = len(sort.args) < 3 and not sort.kwargs and len(shape_of(value_of(key))) == 1
    source: Any = key.args[0] if name_of(key) in ("flatten", "reshape") else None
    shape = shape_of(value_of(source)) if isinstance(source, fx.Node) else ()
    if not plain or len(shape) != 2 or not sizes.carries(shape[0]) or not shape[1].is_Integer:
        return None
    is_topk = source.op == "call_function" and name_of(source) == "getitem" and name_of(source.args[0]) == "topk"
    return source if is_topk and source.args[1] == 1 else None


def _counts(picked: fx.Node) -> list[fx.Node]:
    """How many pairs each expert has, in order: ones at ``picked`` in a table of zeros, summed up."""
    for table in (u for u in picked.users if name_of(u) == "scatter"):
        empty: Any = table.args[0]
        if name_of(empty) not in _EMPTY or (name_of(empty) == "full" and empty.args[1] != 0):
            continue
        if tuple(table.args[1:]) not in ((1, picked, 1), (-1, picked, 1)) or table.kwargs:
            continue
        node = table
        while len(node.users) == 1 and name_of(node) != "unbind":
            user = next(iter(node.users))
            summed = name_of(user) == "sum" and user.args[1:] == ([0],) and len(shape_of(value_of(node))) == 2
            if not summed and name_of(user) not in _SAME | {"unbind"}:
                break
            node = user
        experts = shape_of(value_of(empty))[1]
        each = sorted((u for u in node.users if name_of(u) == "getitem"), key=lambda u: u.args[1])  # type: ignore[arg-type, return-value]
        items = [u for e in each for u in e.users]
        single = name_of(node) == "unbind" and len(node.users) == len(each) == len(items) == experts
        if single and all(name_of(i) == "item" for i in items):
            return items
    return []


@dataclass
class _Group:
    """All that follows one sort. places: where in ``[n]`` or ``[n/m]`` rows each sorted pair belongs.

    moved: values ``[n, ..]`` in the sorted order; parts: those of one expert; lists: what ``getitem`` reads them from.
    """

    sizes: Sizes
    sort: fx.Node
    each: int
    counts: list[fx.Node]
    places: dict[fx.Node, int] = field(default_factory=dict)
    moved: set[fx.Node] = field(default_factory=set)
    parts: dict[fx.Node, int] = field(default_factory=dict)
    lists: set[fx.Node] = field(default_factory=set)
    nodes: set[fx.Node] = field(default_factory=set)

    def closes(self, tokens: Collection[fx.Node]) -> bool:
        """Whether all that is made in the sorted order is put back, and the counts do nothing but cut."""
        self.nodes = {self.sort, *self.counts, *self._counted()}
        for node in tokens:
            ordered = {self.sort, *self.places, *self.moved, *self.parts, *self.lists, *self.counts}
            if any(a in ordered for a in node.all_input_nodes):
                if not self._takes(node):
                    return False
                self.nodes.add(node)
        return True

    def _counted(self) -> set[fx.Node]:
        """The sum that the counts come from."""
        node: Any = self.counts[0]
        while name_of(node) != "sum":
            node = node.args[0]
        return {node}

    def _takes(self, node: fx.Node) -> bool:
        name, source = name_of(node), node.args[0] if node.args else None
        if name == "getitem":
            return self._item(node)
        if name in ("div", "floor_divide") and source in self.places:
            rounded = name == "floor_divide" or node.kwargs.get("rounding_mode") in ("trunc", "floor")
            self.places[node] = self.each
            return bool(rounded and self.places[source] == 1 and node.args[1] == self.each)  # type: ignore[index]
        if name == "index":
            self.moved.add(node)
            return self._reads(node)
        if name == "split_with_sizes" and list(node.args[1]) == self.counts:  # type: ignore[arg-type]
            self.lists.add(node)
            return source in self.moved and node.args[2:] in ((), (0,))
        if name == "cat":
            self.moved.add(node)
            order = [self.parts.get(p) for p in source]  # type: ignore[union-attr, arg-type]
            return order == list(range(len(self.counts))) and node.args[1:] in ((), (0,))
        if name == "index_add":
            return self._puts_back(node)
        return self._rowwise(node, name)

    def _item(self, node: fx.Node) -> bool:
        source, at = node.args
        if source is self.sort:
            self.places[node] = 1
            return bool(at == 1)
        if name_of(source) == "split_with_sizes" and list(source.args[1]) == self.counts:  # type: ignore[union-attr, arg-type]
            self.parts[node] = at  # type: ignore[assignment]
        else:
            self.moved.add(node)
        return source in self.lists

    def _reads(self, node: fx.Node) -> bool:
        given: Any = node.args
        source, at = given
        return len(at) == 1 and at[0] in self.places and self._fits(source, at[0])

    def _puts_back(self, node: fx.Node) -> bool:
        given: Any = node.args
        target, dim, place, values = given[:4]
        return dim == 0 and place in self.places and values in self.moved and self._fits(target, place)

    def _fits(self, value: Any, place: Any) -> bool:
        """Whether a value in the tokens' own order has as many rows as a place counts."""
        made = {*self.places, *self.moved, *self.parts, *self.lists}
        key: Any = self.sort.args[0]
        pairs = shape_of(value_of(key))[0]
        return value not in made and bool(shape_of(value_of(value))[0] * self.places[place] == pairs)

    def _rowwise(self, node: fx.Node, name: str) -> bool:
        """An operator that makes each row of the rows at the same place, and of what no token decides."""
        given = node.all_input_nodes
        rows = [a for a in given if a in self.moved or a in self.parts]
        alike = len({self.parts.get(a) for a in rows}) == 1
        rest = (a for a in given if a not in rows)
        if not rows or not alike or any(any(map(self._counts_rows, shape_of(value_of(a)))) for a in rest):
            return False
        rank = len(shape_of(value_of(rows[0])))
        if name in ("chunk", "split"):
            self.lists.add(node)
            return rows[0] in self.moved and node.args[2:] in ((-1,), (rank - 1,)) and rank > 1
        if rows[0] in self.parts:
            self.parts[node] = self.parts[rows[0]]
        else:
            self.moved.add(node)
        if name in ("linear", "unsqueeze", "slice"):
            behind: Any = name != "unsqueeze" or node.args[1] % (rank + 1) > 0  # type: ignore[operator]
            whole_rows = rank > 1 if name == "linear" else name == "unsqueeze" or _is_whole(node, rows[0])
            return node.args[0] is rows[0] and len(rows) == 1 and bool(behind) and whole_rows
        whole = len(shape_of(value_of(node)))
        return (is_pointwise(node) or name in _SAME) and all(len(shape_of(value_of(a))) == whole for a in rows)

    def _counts_rows(self, size: Any) -> bool:
        return self.sizes.carries(size) or any(symbol_is_type(s, SymT.UNBACKED_INT) for s in size.free_symbols)


def _is_whole(node: fx.Node, source: fx.Node) -> bool:
    return shape_of(value_of(node)) == shape_of(value_of(source))
