"""Find attention in a graph: fused, or written out as product, softmax, product. Changes nothing.

Between the two products the last dim of a value counts keys, and every other sequence dim counts queries.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import fx

from modpass.analysis import Refusal
from modpass.dropout import AttentionDropout
from modpass.mixing import LAYOUT, name_of
from modpass.symbols import Expr, shape_of, value_of

__all__ = ["PRODUCTS", "Attention", "Attentions", "arguments_of", "find_attention", "is_fused", "moves"]

Carries = Callable[[Expr], bool]

PRODUCTS = {"matmul", "bmm", "baddbmm"}  # those that pair two sets of tokens


@dataclass(frozen=True)
class Attention:
    """One attention over tokens of the graph.

    node: the fused operator, or the first product; keys, values: what it attends to, as the products take them.
    weigh: the second product, of the weights with the values (the fused operator itself).
    """

    node: fx.Node
    keys: fx.Node
    values: fx.Node
    weigh: fx.Node

    @property
    def fused(self) -> bool:
        """Whether one operator holds all of it."""
        return self.node is self.weigh


@dataclass(frozen=True)
class Attentions:
    """All attention over tokens in a graph; keyed: the nodes whose last dim counts keys."""

    found: tuple[Attention, ...]
    keyed: frozenset[fx.Node]

    def at(self, node: fx.Node) -> Attention | None:
        """The attention that begins or ends at ``node``."""
        return next((a for a in self.found if node in (a.node, a.weigh)), None)


def is_fused(node: fx.Node) -> bool:
    """Whether a node is ``scaled_dot_product_attention``, with or without dropout."""
    if node.op == "call_module":
        owner: Any = node.graph.owning_module
        return isinstance(owner.get_submodule(str(node.target)), AttentionDropout)
    return node.op == "call_function" and name_of(node) == "scaled_dot_product_attention"


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of fused attention by name."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    return {**dict(zip(names, node.args, strict=False)), **dict(node.kwargs)}


def find_attention(nodes: Collection[fx.Node], carries: Carries) -> Attentions:
    """Find attention among ``nodes``, all of which depend on the tokens.

    ``carries`` tells whether a size counts tokens.

    Raises:
        Refusal: attention is laid out in a way that cannot be followed; says how.
    """
    inner, keyed, found = set(nodes), set[fx.Node](), list[Attention]()
    open_at: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if is_fused(node):
            given = arguments_of(node)
            if given["key"] in inner:
                found.append(Attention(node, given["key"], given["value"], node))
            continue
        left, right = _operands(node)
        sources = [open_at[a] for a in node.all_input_nodes if a in open_at]
        if left is not None and left in keyed:
            assert right is not None
            found.append(_close(node, open_at[left], right, carries))
        elif sources and _has_both(node, carries):
            keyed.add(node)
            open_at[node] = sources[0]
        elif left in inner and right in inner and _scores(node, right, carries):
            keyed.add(node)
            open_at[node] = node
    ended = {a.node for a in found}
    dangling = next((n for n in keyed if open_at[n] not in ended), None)
    if dangling is not None:
        raise Refusal(f"{dangling.target} multiplies tokens with tokens outside attention (node {dangling.name})")
    return Attentions(tuple(found), frozenset(keyed))


def _operands(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    if node.op != "call_function" or name_of(node) not in PRODUCTS:
        return None, None
    first: Any = node.args[1:3] if name_of(node) == "baddbmm" else node.args[:2]
    return first[0], first[1]


def _scores(node: fx.Node, right: fx.Node | None, carries: Carries) -> bool:
    """A product of tokens with tokens: its last dim counts the right operand's tokens."""
    keys, shape = shape_of(value_of(right)) if right is not None else (), shape_of(value_of(node))
    return len(keys) >= 3 and carries(keys[-1]) and sum(map(carries, shape)) > 1


def _close(node: fx.Node, start: fx.Node, values: fx.Node, carries: Carries) -> Attention:
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


def moves(node: fx.Node) -> bool:
    """Whether a node only moves the numbers of its one tensor about."""
    return node.op == "call_function" and name_of(node) in LAYOUT
