"""A routed block over a whole prompt, which also fills its cache of k slots.

Shapes: B rows, S tokens of the prompt, N slots of the cache, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from modpass.attention_find import find_attention
from modpass.causal import causal_slots, dependent
from modpass.decode.caches import Cut, cut_at
from modpass.decode.model import Cache, Routing
from modpass.dropout import undo_dropout
from modpass.functional import gather_tokens, take, write_back
from modpass.routing import RoutedBlock
from modpass.sizes import Sizes
from modpass.symbols import shape_of, value_of

__all__ = ["PrefillBlock"]


class PrefillBlock(nn.Module):
    """``forward(x, keep, length, *sides)`` returns the stream, count ``[B]``, places ``[B, N]`` and the caches."""

    def __init__(self, block: RoutedBlock, max_sequence: int, known: dict[Any, int]) -> None:
        super().__init__()
        self._block = [block]  # in a list: its parameters are registered where the model has them
        self.slots = block.slots(max_sequence)
        self.body, cuts = _with_caches(block, known)
        self.dims = tuple(c.dim for c, _ in cuts)
        self.caches = tuple(self._cache(i, cut, sizes, known) for i, (cut, sizes) in enumerate(cuts))

    @property
    def block(self) -> RoutedBlock:
        """The routed block that this is a prefill of."""
        return self._block[0]

    def _cache(self, i: int, cut: Cut, sizes: Sizes, known: dict[Any, int]) -> Cache:
        shape = [sizes.canonical(s).subs(known) for s in shape_of(value_of(cut.node))]
        whole = tuple(self.slots if d == cut.dim else int(s) for d, s in enumerate(shape))
        return Cache(f"{self.block.name}.cache_{i}", whole, value_of(cut.node).dtype, cut.dim, self.block.name)

    def routing(self) -> Routing:
        """The state that this fills."""
        return Routing(self.block.name, self.slots, self.caches)

    def forward(self, x: Tensor, keep_BS: Tensor | None, length_B: Tensor, *sides: Tensor) -> tuple[Tensor, ...]:
        """Run the first N tokens that pass, and keep what decode needs of them."""
        block = self.block
        x_BSD = x if block.seq_dim == 1 else x.transpose(0, 1)
        S = x_BSD.shape[1]
        k = min(self.slots, S)
        scores_BS = block.router(x_BSD)
        real_BS = torch.arange(S, device=x.device) < length_B[:, None]
        index_Bk = causal_slots(block.passes(block.logits(x_BSD, scores_BS), keep_BS) & real_BS, k)
        safe_Bk, used_Bk = index_Bk.clamp(max=S - 1), index_Bk < S
        taken = [s if g is None else take(s, safe_Bk, g) for s, g in zip(sides, block.gathers, strict=True)]
        x_BkD = gather_tokens(x_BSD, safe_Bk)
        x_k = x_BkD if block.seq_dim == 1 else x_BkD.transpose(0, 1)
        y_k, *cached = self.body(x_k, *taken, *block.own(), used_Bk)
        y_BkD = y_k if block.seq_dim == 1 else y_k.transpose(0, 1)
        update_BkD = block.combine(x_BkD, y_BkD, gather_tokens(scores_BS, safe_Bk))
        out_BSD = write_back(F.pad(x_BSD, (0, 0, 0, 1)), update_BkD, index_Bk)[:, :S]
        out = out_BSD if block.seq_dim == 1 else out_BSD.transpose(0, 1)
        places_BN = F.pad(torch.where(used_Bk, index_Bk, 0), (0, self.slots - k))
        grown = (self._grow(c, d, k) for c, d in zip(cached, self.dims, strict=True))
        return (out, used_Bk.sum(1), places_BN, *grown)

    def _grow(self, cache: Tensor, dim: int, k: int) -> Tensor:
        return F.pad(cache, [0, 0] * (cache.dim() - 1 - dim) + [0, self.slots - k]) if k < self.slots else cache


def _with_caches(block: RoutedBlock, known: dict[Any, int]) -> tuple[fx.GraphModule, list[tuple[Cut, Sizes]]]:
    """The causal body with the values to be cached as further outputs, in the order of the step's caches."""
    graph = undo_dropout(block.causal_body)
    stream = next(n for n in graph.nodes if n.op == "placeholder")
    shape = shape_of(value_of(stream))
    sizes = Sizes(shape[1 - block.seq_dim], shape[block.seq_dim])
    tokens = dependent(graph, stream)
    found: dict[fx.Node, Cut] = {}
    for _, end in find_attention(tokens, sizes.carries).cached():
        cut = cut_at(end, {*tokens, stream}, sizes, known)
        found.setdefault(cut.node, cut)
    output = next(n for n in graph.nodes if n.op == "output")
    output.args = ((output.args[0], *found),)
    return fx.GraphModule(block.causal_body, graph, "PrefillBody"), [(c, sizes) for c in found.values()]
