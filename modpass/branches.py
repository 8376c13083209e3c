"""The residual branches of a block, and of which kind each is.

Between the block's stream and its output lie residual values through which everything passes: ``x``, then
``x + attention(norm(x))``, then that plus the MLP. The nodes from one to the next are a branch. A norm after the sum
(BERT) belongs to the branch before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from modpass.analysis import Analysis
from modpass.mixing import name_of
from modpass.region import RESIDUAL
from modpass.rewrite import summands
from modpass.symbols import shape_of, value_of

__all__ = ["Branches", "Cut", "upstream"]

_PRODUCTS = {"linear", "matmul", "addbmm", "einsum", "mv", "dot"}
_SOFTMAX = {"softmax", "_softmax", "_safe_softmax"}
_JOINS = {"add", "add_", "cat", "concat", "stack"}


@dataclass(frozen=True)
class Cut:
    """Where a part lies: from one residual value to the next.

    terms: where attention and MLP are terms of one sum, those of the part; the sum is regrouped before routing.
    """

    stream: fx.Node
    output: fx.Node
    terms: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class _Branch:
    start: fx.Node
    total: fx.Node  # the sum
    end: fx.Node  # the sum, or the norm after it
    kind: str | None  # attention, cross, mlp, parallel; None for one without a product


class Branches:
    """The branches of one block, in order."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis, self.inseparable = analysis, ""
        self.order = [analysis.stream, *_between(analysis.tokens, analysis.stream, analysis.output)]
        self.found: list[_Branch] = []
        spine = self._spine()
        for start, end in pairwise(spine):
            branch = _Branch(start, end, end, self._kind(start, end))
            if branch.kind is None and self.found:
                last = self.found.pop()
                branch = _Branch(last.start, last.total, end, last.kind)
            self.found.append(branch)

    def cuts(self, kind: str) -> list[Cut]:
        """The places of a part; neighbours of the same kind are one."""
        found: list[Cut] = []
        for branch in self.found:
            if branch.kind == "parallel":
                found += self._terms(branch, kind)
            elif branch.kind == kind and _skips(branch, self.order):
                joined = found and not found[-1].terms and found[-1].output is branch.start
                start = found.pop().stream if joined else branch.start
                found.append(Cut(start, branch.end))
        return found

    def pieces(self, kind: str) -> list[Cut]:
        """The branches of a kind one by one, but for those that share their residual with another."""
        return [Cut(b.start, b.end) for b in self.found if b.kind == kind and _skips(b, self.order)]

    def _spine(self) -> list[fx.Node]:
        """The values of the stream's shape that no edge jumps over: every path passes through them."""
        place = {n: i for i, n in enumerate(self.order)}
        reach, found = 0, []
        wanted = shape_of(value_of(self.analysis.stream)), value_of(self.analysis.stream).dtype
        for i, node in enumerate(self.order):
            value = value_of(node)
            if reach <= i and (shape_of(value), getattr(value, "dtype", None)) == wanted:
                found.append(node)
            reach = max([reach, *(place[u] for u in node.users if u in place)])
        return found

    def _kind(self, start: fx.Node, end: fx.Node) -> str | None:
        nodes = _between(self.order, start, end)
        kinds = [k for n in nodes if (k := self._attends(n))]
        if not kinds:
            return "mlp" if any(map(self._works, nodes)) else None
        if "attention" in kinds and self._has_parallel_product(nodes):
            return "parallel"
        return "attention" if "attention" in kinds else "cross"

    def _works(self, node: fx.Node) -> bool:
        """A product, or an operator that may be anything."""
        name = name_of(node)
        return name in _PRODUCTS or name.endswith("mm") or name.startswith("conv") or node in self.analysis.unknown

    def _attends(self, node: fx.Node) -> str | None:
        """Attention over the block's own tokens, or over others."""
        shape, carries, name = shape_of(value_of(node)), self.analysis.sizes.carries, name_of(node)
        if name == "scaled_dot_product_attention":
            key = node.args[1]
            return "attention" if isinstance(key, fx.Node) and carries(shape_of(value_of(key))[-2]) else "cross"
        if name in _SOFTMAX and len(shape) >= 3 and carries(shape[-1]):
            return "attention"
        if name in ("matmul", "bmm", "baddbmm") and sum(map(carries, shape[-2:])) > 1:
            return "attention"
        return "cross" if name in _SOFTMAX and len(shape) >= 4 else None  # a router's has three dims at most

    def _has_parallel_product(self, nodes: list[fx.Node]) -> bool:
        """Whether a product neither feeds attention nor follows it, and joins it as neither its gate nor its values."""
        attention = [n for n in nodes if self._attends(n) == "attention"]
        before, after = upstream(attention, nodes), _downstream(attention, nodes)
        for product in (n for n in nodes if self._works(n) and n not in before and n not in after):
            reached = _downstream([product], nodes)
            meeting = next((n for n in nodes if n in reached and n in after), None)
            if meeting is not None and name_of(meeting) in _JOINS:
                return True
        return False

    def _terms(self, branch: _Branch, kind: str) -> list[Cut]:
        """The terms of a sum ``x + attention(x) + mlp(x)`` that are the part."""
        nodes = _between(self.order, branch.start, branch.total)
        attention = {n for n in nodes if self._attends(n)}
        terms: dict[str, list[fx.Node]] = {"attention": [], "mlp": []}
        whole = summands(branch.total)
        for term in whole:
            made_of = {term} | upstream([term], nodes)
            if term in nodes and any(map(self._works, made_of)):
                terms["attention" if made_of & attention else "mlp"].append(term)
        if branch.start not in whole or not terms["mlp"] or len(terms["attention"]) != 1:
            self.inseparable = "its attention and its MLP are branches of one residual, and no terms of its sum"
            return []
        return [Cut(branch.start, branch.total, tuple(terms[kind]))]


def _between(nodes: Iterable[fx.Node], start: fx.Node, end: fx.Node) -> list[fx.Node]:
    """Those of ``nodes`` that ``end`` is made of and that depend on ``start``, in order; without ``start``."""
    nodes = list(nodes)
    needed = {end} | upstream([end], nodes, start)
    reached = {start}
    for node in nodes:
        if node in needed and any(a in reached for a in node.all_input_nodes):
            reached.add(node)
    return [n for n in nodes if n in reached and n is not start]


def upstream(targets: list[fx.Node], nodes: Iterable[fx.Node], stop: fx.Node | None = None) -> set[fx.Node]:
    """Those of ``nodes`` that ``targets`` are made of, looking no further than ``stop``."""
    allowed, found, frontier = set(nodes), set[fx.Node](), list(targets)
    while frontier:
        steps = [a for a in frontier.pop().all_input_nodes if a in allowed and a not in found and a is not stop]
        found.update(steps)
        frontier += steps
    return found


def _downstream(sources: list[fx.Node], nodes: list[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set(sources)
    for node in nodes:
        if any(a in found for a in node.all_input_nodes):
            found.add(node)
    return found - set(sources)


def _skips(branch: _Branch, order: list[fx.Node]) -> bool:
    """Whether the start goes into the end by sums and norms alone."""
    frontier, seen, inside = [branch.end], {branch.end}, set(order)
    while frontier:
        node = frontier.pop()
        if node is branch.start:
            return True
        if name_of(node) in RESIDUAL and node in inside:
            alike = [a for a in node.all_input_nodes if shape_of(value_of(a)) == shape_of(value_of(node))]
            frontier += [a for a in alike if a not in seen]
            seen.update(alike)
    return False
