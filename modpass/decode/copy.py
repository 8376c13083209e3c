"""Copy a graph for one token a row: attention reads caches, everything else sees a sequence of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from modpass.attention import Attention, arguments_of
from modpass.attention_find import find_attention
from modpass.decode.attend import attend, hide_later, join_scores, weigh
from modpass.decode.caches import Cut, cut_at, spreads_heads
from modpass.decode.memory import Memory, Remembered
from modpass.decode.names import free_placeholder
from modpass.decode.recall import recall
from modpass.decode.worlds import is_size, size_at
from modpass.mixing import name_of
from modpass.sizes import Refusal, Sizes
from modpass.symbols import shape_of, value_of

__all__ = ["CacheSpec", "StepCopy"]

Side = Callable[[fx.Node, fx.Node], Any]


class CacheSpec:
    """A cache that a step reads: its shape, the dim that counts slots, its dtype, and the node it holds."""

    def __init__(self, node: fx.Node, kind: str, shape: tuple[int, ...], dim: int, place: fx.Node) -> None:
        self.node, self.kind, self.shape, self.dim, self.place = node, kind, shape, dim, place
        self.dtype: torch.dtype = value_of(node).dtype
        self.name = ""


class StepCopy:
    """Copies the nodes that depend on the tokens into ``graph``.

    sizes: the batch and sequence of the source; known: its other free sizes, the batch included; slots: how many
    tokens a cache holds; slot: the node that says where the new token of each row goes; side: makes a side input
    for a consumer, at the token's own position; memory: what is remembered of earlier tokens outside attention.
    """

    def __init__(
        self,
        graph: fx.Graph,
        tokens: list[fx.Node],
        sizes: Sizes,
        known: dict[Any, int],
        slots: int,
        side: Side,
        memory: Memory | None = None,
    ) -> None:
        self.memory = memory or Memory()
        self.graph, self.tokens, self.inner = graph, tokens, set(tokens)
        self.sizes, self.known, self.slots, self.side = sizes, known, slots, side
        self.attentions = find_attention(tokens, sizes.carries)
        self.step: dict[fx.Node, Any] = {}
        self.cached: dict[fx.Node, fx.Node] = {}
        self.caches: list[CacheSpec] = []
        self.remembered: dict[Remembered, fx.Node] = {}
        self.left: dict[Remembered, fx.Node] = {}
        self.slot: Any = None
        self.beside = set(self.attentions.beside)

    def cuts(self) -> dict[fx.Node, Cut]:
        """The cut of everything that is cached, in order."""
        return {n: cut_at(n, self.inner, self.sizes, self.known) for _, n in self.attentions.cached()}

    def declare(self) -> None:
        """Add a placeholder for each cache, and for each value that is remembered."""
        self.cut = self.cuts()
        for kind, end in self.attentions.cached():
            node, dim = self.cut[end].node, self.cut[end].dim
            if node not in self.cached:
                place = free_placeholder(self.graph, f"cache_{len(self.caches)}")
                self.cached[node] = place
                self.caches.append(CacheSpec(node, kind, self._cache_shape(node, dim), dim, place))
        for i, part in enumerate(self.memory.parts()):
            self.remembered[part] = free_placeholder(self.graph, f"remembered_{i}")

    def _cache_shape(self, node: fx.Node, dim: int) -> tuple[int, ...]:
        shape = [self.sizes.canonical(s).subs(self.known) for s in shape_of(value_of(node))]
        return tuple(self.slots if d == dim else int(s) for d, s in enumerate(shape))

    def run(self, **special: Callable[[fx.Node], Any]) -> None:
        """Copy every token node; ``special`` gives other ways for nodes of a kind of operation."""
        for node in self.tokens:
            attention, product = self.attentions.at(node), self.attentions.product(node)
            if node.op in special:
                made = special[node.op](node)
            elif attention is not None and attention.fused:
                made = self._fused(attention)
            elif product is not None:
                made = self._scores(node, product.keys)
            elif attention is not None:
                made = self._weigh(attention)
            elif node in self.memory.kept:
                made = recall(self, node)
            elif node in self.memory.cut:
                source: Any = node.args[0]
                made = self.call(torch.narrow, self.step[source], node.args[1], self.memory.cut[node], 1)
            else:
                made = self._plain(node)
            self.step[node] = made

    def new_rows(self) -> tuple[Any, ...]:
        """What each cache is to hold for the new token."""
        return tuple(self.step[c.node] for c in self.caches)

    def sees_keys(self, consumer: fx.Node) -> bool:
        """Whether the last dim of what ``consumer`` broadcasts to counts keys."""
        return consumer in self.attentions.keyed or self.attentions.at(consumer) is not None

    def call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call in the step's graph."""
        return self.graph.call_function(function, args, kwargs)

    def value(self, consumer: fx.Node, node: fx.Node) -> Any:
        """What ``consumer`` reads at ``node`` in the step."""
        if node in self.beside and self.sees_keys(consumer):
            return self._joined(node)
        if node in self.step:
            return self.step[node]
        made = self.side(consumer, node)
        exact = name_of(consumer) in ("cat", "concat") or (name_of(consumer) == "gather" and node is consumer.args[2])
        return self._expanded(consumer, node, made) if exact else made

    def _expanded(self, consumer: fx.Node, node: fx.Node, made: Any) -> Any:
        """A side input of what does not broadcast, at its size in a step; a row comes without the dims that do."""
        same = consumer if name_of(consumer) == "gather" else node  # it makes what its places are shaped like
        shape, carries = shape_of(value_of(same)), self.sizes.carries
        if not any(map(carries, shape)):
            return made
        sizes: list[Any] = [1 if carries(s) else int(self.sizes.canonical(s).subs(self.known)) for s in shape]
        if self.sees_keys(consumer) and carries(shape[-1]):
            sizes[-1] = self.slots
        return self.call(torch.Tensor.expand, made, [-1 if shape[0] == 1 else sizes[0], *sizes[1:]])

    def _joined(self, node: fx.Node) -> Any:
        """What each key's own token has said, ``[.., N]``: from the cache, and for the new token from itself."""
        return self.call(join_scores, self._whole(node), self.step[node], self.slot)

    def _plain(self, node: fx.Node) -> fx.Node:
        """The same operator on one token."""
        keyed = node in self.attentions.keyed
        args = self.arguments(node, node.args, keyed)
        kwargs = {k: self.arguments(node, v, keyed) for k, v in node.kwargs.items()}
        if self.attentions.ranked(node):
            args = (self.call(hide_later, args[0], self.slot, self.slots), *args[1:])
        return self.traced(node, self.graph.call_function(node.target, args, kwargs))  # type: ignore[arg-type]

    def traced(self, node: fx.Node, made: fx.Node) -> fx.Node:
        """``made``, said to come from where ``node`` did."""
        made.meta = {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}
        return made

    def arguments(self, consumer: fx.Node, given: Any, keyed: bool, last: bool = True) -> Any:
        """Arguments on one token; a size that counts tokens is one, but the last of a keyed value counts slots.

        So does how many keys are picked.
        """
        last = last or name_of(consumer) == "topk"
        if isinstance(given, fx.Node):
            if is_size(given):
                return size_at(given, self.sizes, self.slots if keyed and last else 1, self.known)
            return self.value(consumer, given)
        if isinstance(given, list | tuple):
            end = len(given) - 1
            made = [self.arguments(consumer, a, keyed, i == end) for i, a in enumerate(given)]
            return tuple(made) if isinstance(given, tuple) else made
        return given

    def _whole(self, node: fx.Node) -> Any:
        """Keys or values as attention takes them, made from the whole cache."""
        cut, env = self.cut[node], dict[fx.Node, Any]()
        env[cut.node] = self.cached[cut.node]
        for moved in cut.path:
            value = lambda a: size_at(a, self.sizes, self.slots, self.known) if is_size(a) else env[a]  # noqa: E731
            args, kwargs = fx.map_arg(moved.args, value), fx.map_arg(moved.kwargs, value)
            env[moved] = self.graph.call_function(moved.target, args, kwargs)  # type: ignore[arg-type]
        return env[node]

    def _fused(self, attention: Attention) -> fx.Node:
        given = arguments_of(attention.node)
        if len(shape_of(value_of(given["query"]))) != 4:
            raise Refusal(
                f"the attention at node {attention.node.name} has no dims [B, H, S, D]; give queries, keys and values "
                "a dim of heads: unsqueeze(1)"
            )
        heads = shape_of(value_of(given["query"]))[1]
        mask = given.get("attn_mask")
        if mask in self.step and mask not in self.beside and not self._one_query(mask):
            raise Refusal(f"the mask of the attention at node {attention.node.name} pairs tokens in an unknown way")
        ends = (attention.keys, attention.values)
        alike = len({shape_of(value_of(self.cut[e].node))[1] for e in ends}) == 1
        if alike and all(spreads_heads(self.cut[e], int(heads), self.sizes, self.known) for e in ends):
            new = [self.step[self.cut[e].node] for e in ends]
            whole = [self.cached[self.cut[e].node] for e in ends]
        else:
            new, whole = [self.step[e] for e in ends], [self._whole(e) for e in ends]
        row = None if mask is None else self.value(attention.node, mask)
        query = self.value(attention.node, given["query"])
        made = self.call(attend, query, *new, *whole, self.slot, row, given.get("scale"))
        return self.traced(attention.node, made)

    def _one_query(self, mask: fx.Node) -> bool:
        """Whether a mask made of tokens is followed key by key, or is the query's own."""
        return mask in self.attentions.keyed or not self.sizes.carries(shape_of(value_of(mask))[-1])

    def _scores(self, node: fx.Node, keys: fx.Node) -> fx.Node:
        first: Any = node.args[1] if name_of(node) == "baddbmm" else node.args[0]
        query = self.value(node, first)
        new = self.call(torch.matmul, query, self.step[keys])
        joined = self.call(join_scores, self.call(torch.matmul, query, self._whole(keys)), new, self.slot)
        if name_of(node) == "baddbmm":
            bias = self.value(node, node.args[0])  # type: ignore[arg-type]
            beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
            scaled = self.call(torch.mul, joined, alpha)
            joined = self.call(torch.add, scaled, self.call(torch.mul, bias, beta))
        return self.traced(node, joined)

    def _weigh(self, attention: Attention) -> fx.Node:
        node = attention.weigh
        if name_of(node) == "baddbmm":
            raise Refusal(f"{node.target} adds to the weighed values (node {node.name})")
        weights = self.step[node.args[0]]  # type: ignore[index]
        new, whole = self.step[attention.values], self._whole(attention.values)
        return self.traced(node, self.call(weigh, weights, whole, new, self.slot))
