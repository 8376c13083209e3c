"""Find attention in a graph: fused, or written out as product, softmax, product. Changes nothing.

The scores may be joined with biases and masks that tokens make, and keys may be picked by scores of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from modpass.attention import PRODUCTS, Attention, Attentions, Product, arguments_of, is_fused
from modpass.mixing import is_pointwise, name_of
from modpass.sizes import Refusal
from modpass.sparse import is_pick, picks_keys
from modpass.symbols import Expr, shape_of, value_of

__all__ = ["find_attention"]

Carries = Callable[[Expr], bool]


def find_attention(nodes: Collection[fx.Node], carries: Carries) -> Attentions:
    """Find attention among ``nodes``, all of which depend on the tokens.

    ``carries`` tells whether a size counts tokens.

    Raises:
        Refusal: attention is laid out in a way that cannot be followed; says how.
    """
    finder = _Finder(set(nodes), carries)
    for node in nodes:
        finder.visit(node)
    return finder.attentions()


@dataclass
class _Finder:
    """open_at: for each keyed node, the product that its scores come from; None for a mask or a bias."""

    inner: set[fx.Node]
    carries: Carries
    open_at: dict[fx.Node, fx.Node | None] = field(default_factory=dict)
    found: list[Attention] = field(default_factory=list)
    picks: dict[fx.Node, Product] = field(default_factory=dict)
    beside: dict[fx.Node, None] = field(default_factory=dict)

    def visit(self, node: fx.Node) -> None:
        if is_fused(node):
            self._fused(node)
            return
        left, right = _operands(node)
        starts = [self.open_at[a] for a in node.all_input_nodes if a in self.open_at]
        if left is not None and left in self.open_at:
            assert right is not None
            self.found.append(_close(node, self.open_at[left], right, self.carries))
        elif picks_keys(node, self.carries):
            self._pick(node)
        elif self._meet(left, right) and _scores(node, right, self.carries):
            self._open(node, node)
        elif (starts and _has_both(node, self.carries)) or self._makes_bias(node):
            self._open(node, next((s for s in starts if s is not None), None))

    def _meet(self, left: fx.Node | None, right: fx.Node | None) -> bool:
        """Whether a product is of two values of tokens, neither of which holds scores."""
        return left in self.inner and right in self.inner and right not in self.open_at

    def _fused(self, node: fx.Node) -> None:
        given = arguments_of(node)
        mask = given.get("attn_mask")
        if mask in self.inner and mask not in self.open_at and self._last(mask):
            self.beside[mask] = None
        if given["key"] in self.inner:
            self.found.append(Attention(node, given["key"], given["value"], node))

    def _open(self, node: fx.Node, start: fx.Node | None) -> None:
        self.open_at[node] = start
        for other in node.all_input_nodes:
            if other not in _operands(node) and other in self.inner and other not in self.open_at and self._last(other):
                self.beside[other] = None

    def _pick(self, node: fx.Node) -> None:
        scores: Any = node.args[0]
        if name_of(node) == "topk" and (node.args[3:4] == (False,) or node.kwargs.get("largest") is False):
            raise Refusal(f"{node.target} picks the keys with the lowest scores (node {node.name})")
        start = self.open_at.get(scores)
        if start is not None and is_pick(node, self.carries):
            self.picks[start] = Product(start, _operands(start)[1])  # type: ignore[arg-type]
        self.open_at[node] = None

    def _makes_bias(self, node: fx.Node) -> bool:
        """A mask or bias for each pair of tokens, made place by place, or read from a table of the query's own."""
        shape = shape_of(value_of(node))
        if not shape or not self.carries(shape[-1]) or sum(map(self.carries, shape)) < 2:
            return False
        if name_of(node) == "gather":
            return node.args[1] in (-1, len(shape) - 1) and node.args[2] not in self.inner
        return is_pointwise(node) or name_of(node) == "expand"

    def _last(self, node: fx.Node) -> bool:
        shape = shape_of(value_of(node))
        return bool(shape) and self.carries(shape[-1])

    def attentions(self) -> Attentions:
        ended = {a.node for a in self.found} | set(self.picks)
        dangling = next((n for n, s in self.open_at.items() if s is not None and s not in ended), None)
        if dangling is not None:
            raise Refusal(f"{dangling.target} multiplies tokens with tokens outside attention (node {dangling.name})")
        return Attentions(tuple(self.found), tuple(self.picks.values()), frozenset(self.open_at), tuple(self.beside))


def _operands(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    if node.op != "call_function" or name_of(node) not in PRODUCTS:
        return None, None
    first: Any = node.args[1:3] if name_of(node) == "baddbmm" else node.args[:2]
    return first[0], first[1]


def _scores(node: fx.Node, right: fx.Node | None, carries: Carries) -> bool:
    """A product of tokens with tokens: its last dim counts the right operand's tokens."""
    keys, shape = shape_of(value_of(right)) if right is not None else (), shape_of(value_of(node))
    return len(keys) >= 3 and carries(keys[-1]) and sum(map(carries, shape)) > 1


def _close(node: fx.Node, start: fx.Node | None, values: fx.Node, carries: Carries) -> Attention:
    if start is None:
        raise Refusal(f"{node.target} weighs values by what no query and key made (node {node.name})")
    keys = _operands(start)[1]
    shape = shape_of(value_of(values))
    if keys is None or len(shape) < 2 or not carries(shape[-2]):
        raise Refusal(f"{node.target} does not weigh the values by their tokens (node {node.name})")
    return Attention(start, keys, values, node)


def _has_both(node: fx.Node, carries: Carries) -> bool:
    """Whether a value still holds queries and keys; a reduction over the keys ends that."""
    shape = shape_of(value_of(node))
    both = sum(map(carries, shape)) > 1
    if both and not carries(shape[-1]):
        raise Refusal(f"{node.target} moves the keys from the last dim (node {node.name})")
    return both
