"""Attention in a graph: fused, or written out as product, softmax, product.

Between the two products the last dim of a value counts keys, and every other sequence dim counts queries. The same
holds for what is added to scores or masks them, and for the scores by which keys are picked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from modpass.dropout import AttentionDropout
from modpass.mixing import LAYOUT, SOFTMAX, name_of

__all__ = ["PRODUCTS", "Attention", "Attentions", "Product", "arguments_of", "is_fused", "moves"]

PRODUCTS = {"matmul", "bmm", "baddbmm"}  # those that pair two sets of tokens


@dataclass(frozen=True)
class Product:
    """Where queries meet keys. node: the product, or fused attention; keys: what the queries meet there."""

    node: fx.Node
    keys: fx.Node


@dataclass(frozen=True)
class Attention(Product):
    """One attention over tokens of the graph.

    values: what the weights are for; weigh: the product of the weights with them (the fused operator itself).
    """

    values: fx.Node
    weigh: fx.Node

    @property
    def fused(self) -> bool:
        """Whether one operator holds all of it."""
        return self.node is self.weigh


@dataclass(frozen=True)
class Attentions:
    """All attention over tokens in a graph.

    picks: scores by which keys are picked for a mask; keyed: the nodes whose last dim counts keys; beside: values of
    the keys' own tokens, ``[.., S]``, that scores or masks are made of.
    """

    found: tuple[Attention, ...]
    picks: tuple[Product, ...]
    keyed: frozenset[fx.Node]
    beside: tuple[fx.Node, ...]

    def at(self, node: fx.Node) -> Attention | None:
        """The attention that begins or ends at ``node``."""
        return next((a for a in self.found if node in (a.node, a.weigh)), None)

    def product(self, node: fx.Node) -> Product | None:
        """The product of queries and keys at ``node``, if there is one that is written out."""
        written: list[Product] = [a for a in self.found if not a.fused]
        return next((p for p in (*written, *self.picks) if node is p.node), None)

    def cached(self) -> list[tuple[str, fx.Node]]:
        """What of earlier tokens a later one reads, each with its kind, in a fixed order."""
        ends = [(kind, n) for a in self.found for kind, n in (("key", a.keys), ("value", a.values))]
        picked = [("index_key", p.keys) for p in self.picks]
        found = {n: kind for kind, n in reversed([*ends, *picked, *(("key_bias", n) for n in self.beside)])}
        return [(kind, n) for n, kind in reversed(found.items())]

    def ranked(self, node: fx.Node) -> bool:
        """Whether ``node`` weighs or ranks scores by their keys, so that a key can be hidden in them before it."""
        return name_of(node) in SOFTMAX | {"topk"} and node.args[0] in self.keyed


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


def moves(node: fx.Node) -> bool:
    """Whether a node only moves the numbers of its one tensor about."""
    return node.op == "call_function" and name_of(node) in LAYOUT
