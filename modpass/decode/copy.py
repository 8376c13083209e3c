"""Copy a graph for one token a row: attention reads caches, everything else sees a sequence of one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx

from modpass.analysis import SEQUENCE, Refusal, Sizes, canonical_arguments, merges_rows
from modpass.attention import Attention, arguments_of, find_attention
from modpass.decode.attend import attend, hide_later, join_scores, weigh
from modpass.decode.caches import Cut, cut_at, spreads_heads
from modpass.decode.memory import Memory, Remembered
from modpass.decode.names import free_placeholder
from modpass.decode.worlds import is_size, size_at
from modpass.mixing import mixing_reason, name_of
from modpass.sparse import picks_keys
from modpass.symbols import expr_of, shape_of, value_of

__all__ = ["CacheSpec", "StepCopy", "refuse_mixing"]

_EXACT = {"gather", "cat", "concat"}  # these do not broadcast
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
                made = self._remembering(node)
            elif node in self.memory.cut:
                made = self._call(torch.narrow, self.step[node.args[0]], node.args[1], self.memory.cut[node], 1)
            else:
                made = self._plain(node)
            self.step[node] = made

    def new_rows(self) -> tuple[Any, ...]:
        """What each cache is to hold for the new token."""
        return tuple(self.step[c.node] for c in self.caches)

    def _remembering(self, node: fx.Node) -> fx.Node:
        """A sum that goes on, or an operator on the last tokens and this one."""
        part = self.memory.kept[node]
        before = self.remembered[part]
        if part.kind == "sum":
            own = self._call(torch.Tensor.to, self._value(node, node.args[0]), value_of(node).dtype)  # type: ignore[arg-type]
            self.left[part] = self._traced(node, self._call(torch.add, before, own))
            return self.left[part]
        window = self._call(torch.cat, [before, self.step[part.node]], part.dim)
        self.left.setdefault(part, self._call(torch.narrow, window, part.dim, 1, part.count))
        if name_of(node) in ("cat", "concat"):
            front: Any = node.args[0]
            return self._call(begin_with, window, self._value(node, front[0]), self.slot, part.dim)
        if name_of(node) != "conv1d":
            return self._call(torch.narrow, window, part.dim, 0, 1) if node in self.memory.cut else window
        weight, bias, stride, _, *rest = (*self._arguments(node, node.args[1:], False),)
        return self._traced(node, self._call(node.target, window, weight, bias, stride, [0], *rest))

    def sees_keys(self, consumer: fx.Node) -> bool:
        """Whether the last dim of what ``consumer`` broadcasts to counts keys."""
        return consumer in self.attentions.keyed or self.attentions.at(consumer) is not None

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(function, args, kwargs)

    def _value(self, consumer: fx.Node, node: fx.Node) -> Any:
        if node in self.beside and self.sees_keys(consumer):
            return self._joined(node)
        if node in self.step:
            return self.step[node]
        made = self.side(consumer, node)
        return self._expanded(consumer, node, made) if name_of(consumer) in _EXACT else made

    def _expanded(self, consumer: fx.Node, node: fx.Node, made: Any) -> Any:
        """A side input at the size that it has in a step; its row may come without the dims that broadcast."""
        shape, carries = shape_of(value_of(node)), self.sizes.carries
        if not any(map(carries, shape)):
            return made
        sizes: list[Any] = [1 if carries(s) else int(self.sizes.canonical(s).subs(self.known)) for s in shape]
        if self.sees_keys(consumer) and carries(shape[-1]):
            sizes[-1] = self.slots
        return self._call(torch.Tensor.expand, made, [-1 if shape[0] == 1 else sizes[0], *sizes[1:]])

    def _joined(self, node: fx.Node) -> Any:
        """What each key's own token has said, ``[.., N]``: from the cache, and for the new token from itself."""
        return self._call(join_scores, self._whole(node), self.step[node], self.slot)

    def _plain(self, node: fx.Node) -> fx.Node:
        """The same operator on one token."""
        keyed = node in self.attentions.keyed
        args = self._arguments(node, node.args, keyed)
        kwargs = {k: self._arguments(node, v, keyed) for k, v in node.kwargs.items()}
        if self.attentions.ranked(node):
            args = (self._call(hide_later, args[0], self.slot, self.slots), *args[1:])
        return self._traced(node, self.graph.call_function(node.target, args, kwargs))  # type: ignore[arg-type]

    def _traced(self, node: fx.Node, made: fx.Node) -> fx.Node:
        made.meta = {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}
        return made

    def _arguments(self, consumer: fx.Node, given: Any, keyed: bool, last: bool = True) -> Any:
        """Arguments on one token; a size that counts tokens is one, but the last of a keyed value counts slots.

        So does how many keys are picked.
        """
        last = last or name_of(consumer) == "topk"
        if isinstance(given, fx.Node):
            if is_size(given):
                return size_at(given, self.sizes, self.slots if keyed and last else 1, self.known)
            return self._value(consumer, given)
        if isinstance(given, list | tuple):
            end = len(given) - 1
            made = [self._arguments(consumer, a, keyed, i == end) for i, a in enumerate(given)]
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
            raise Refusal(f"the attention at node {attention.node.name} has no dims [B, H, S, D]")
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
        row = None if mask is None else self._value(attention.node, mask)
        query = self._value(attention.node, given["query"])
        made = self._call(attend, query, *new, *whole, self.slot, row, given.get("scale"))
        return self._traced(attention.node, made)

    def _one_query(self, mask: fx.Node) -> bool:
        """Whether a mask made of tokens is followed key by key, or is the query's own."""
        return mask in self.attentions.keyed or not self.sizes.carries(shape_of(value_of(mask))[-1])

    def _scores(self, node: fx.Node, keys: fx.Node) -> fx.Node:
        first: Any = node.args[1] if name_of(node) == "baddbmm" else node.args[0]
        query = self._value(node, first)
        new = self._call(torch.matmul, query, self.step[keys])
        joined = self._call(join_scores, self._call(torch.matmul, query, self._whole(keys)), new, self.slot)
        if name_of(node) == "baddbmm":
            bias = self._value(node, node.args[0])  # type: ignore[arg-type]
            beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
            scaled = self._call(torch.mul, joined, alpha)
            joined = self._call(torch.add, scaled, self._call(torch.mul, bias, beta))
        return self._traced(node, joined)

    def _weigh(self, attention: Attention) -> fx.Node:
        node = attention.weigh
        if name_of(node) == "baddbmm":
            raise Refusal(f"{node.target} adds to the weighed values (node {node.name})")
        weights = self.step[node.args[0]]  # type: ignore[index]
        new, whole = self.step[attention.values], self._whole(attention.values)
        return self._traced(node, self._call(weigh, weights, whole, new, self.slot))


def begin_with(window: Tensor, first: Tensor, position_B: Tensor, dim: int) -> Tensor:
    """The token before, out of a window of two; ``first`` where there is none.

    >>> begin_with(torch.tensor([[7, 8], [7, 8]]), torch.tensor([[0]]), torch.tensor([0, 3]), 1).tolist()
    [[0], [7]]
    """
    is_first = position_B.repeat_interleave(window.shape[0] // position_B.shape[0]) == 0
    return torch.where(is_first.view(-1, *[1] * (window.dim() - 1)), first, window.narrow(dim, 0, 1))


def refuse_mixing(tokens: list[fx.Node], sizes: Sizes, remembered: Collection[fx.Node] = ()) -> None:
    """Refuse operators that mix tokens outside attention, or that compute with the sequence length.

    remembered: those that a step makes of what it remembers.

    Raises:
        Refusal: names the operator.
    """
    for node in (n for n in tokens if n.op == "call_function"):
        reason = mixing_reason(node, sizes.carries, sizes.is_batch) or merges_rows(node, sizes)
        if reason and node not in remembered and not picks_keys(node, sizes.carries):
            raise Refusal(f"{reason} (node {node.name})")
        lengths = [a for a in node.all_input_nodes if is_size(a) and sizes.carries(_expr(a))]
        if any(kind in ("number", "Tensor") and a in lengths for kind, a in canonical_arguments(node)):
            raise Refusal(f"{node.target} computes with the sequence length (node {node.name})")


def _expr(node: fx.Node) -> Any:
    return expr_of(value_of(node)) if isinstance(value_of(node), torch.SymInt) else SEQUENCE
