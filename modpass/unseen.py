"""Run a block's body with some tokens hidden from attention, and causal attention by given positions."""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from modpass.mixing import SOFTMAX, name_of
from modpass.record import Recorder
from modpass.sizes import Sizes
from modpass.sparse import is_pick
from modpass.symbols import Expr, shape_of, value_of

__all__ = ["UnseenRunner"]


class UnseenRunner(Recorder):
    """Runs a body whose tokens stand at the positions ``index`` ``[B, k]``.

    seen: ``[B, k]`` bool; attention looks at no other token, except that each token sees itself, so that no row of
    its softmax is empty.
    """

    def __init__(self, body: fx.GraphModule, sizes: Sizes, index_Bk: Tensor, seen_Bk: Tensor | None = None) -> None:
        super().__init__(body)
        self.sizes, self.index_Bk, self.seen_Bk = sizes, index_Bk, seen_Bk

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and remember which it is."""
        self.node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator; attention is given a mask."""
        name = name_of(self.node)
        if name == "scaled_dot_product_attention":
            args, kwargs = (), self._attention(target, args, kwargs)
        elif name in SOFTMAX and self.seen_Bk is not None:
            args = (self._scores(*args[:2]), *args[1:])
        elif is_pick(self.node, self.sizes.carries) and self.seen_Bk is not None:
            args = (self._scores(args[0], -1), *args[1:])
        return super().call_function(target, args, kwargs)

    def _attention(self, target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        names = (a.name for a in target._schema.arguments)
        given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
        query, key = (_shape(a) for a in self.node.args[:2])
        blind = self._blind((*query[:-1], key[-2]), bool(given.get("is_causal")))
        if blind is None:
            return given
        mask = given.get("attn_mask")
        if mask is None or mask.dtype == torch.bool:
            mask = ~blind if mask is None else mask & ~blind
        else:
            mask = mask.masked_fill(blind, -math.inf)
        return {**given, "attn_mask": mask, "is_causal": False}

    def _scores(self, scores: Tensor, dims: Any) -> Tensor:
        """Attention scores with the columns of hidden tokens at -inf; columns that are no tokens stay."""
        shape = _shape(self.node.args[0])
        last = dims if isinstance(dims, int) else dims[0]
        if last not in (-1, len(shape) - 1):
            return scores
        blind = self._blind(shape, causal=False)
        if blind is None:
            return scores
        return scores.masked_fill(F.pad(blind, (0, self.sizes.surplus(shape[-1]))), -math.inf)

    def _blind(self, shape: tuple[Expr, ...], causal: bool) -> Tensor | None:
        """Where queries must not look, broadcast to scores of this traced shape; None if it is not S by S."""
        token_dims = [i for i, size in enumerate(shape) if self.sizes.carries(size)]
        if len(token_dims) != 2 or token_dims[1] != len(shape) - 1 or (self.seen_Bk is None and not causal):
            return None
        k = self.index_Bk.shape[1]
        blind_Bkk = torch.zeros(len(self.index_Bk), k, k, dtype=torch.bool, device=self.index_Bk.device)
        if causal:
            blind_Bkk = self.index_Bk[:, :, None] < self.index_Bk[:, None, :]
        if self.seen_Bk is not None:
            own = torch.eye(k, dtype=torch.bool, device=blind_Bkk.device)
            blind_Bkk = blind_Bkk | (~self.seen_Bk[:, None, :] & ~own)
        return self._placed(blind_Bkk, shape, token_dims[0])

    def _placed(self, blind_Bkk: Tensor, shape: tuple[Expr, ...], query_dim: int) -> Tensor | None:
        """Rows of the batch, repeated where heads are merged into them, and ones for every other dim."""
        for position, size in enumerate(shape[:query_dim]):
            repeat = sympy.simplify(size / self.sizes.batch)
            if repeat.is_Integer and (size == self.sizes.batch or position == 0):
                rows = blind_Bkk.repeat_interleave(int(repeat), 0)
                sizes = [1] * len(shape)
                sizes[position], sizes[query_dim], sizes[-1] = rows.shape
                return rows.view(sizes)
        return None


def _shape(argument: Any) -> tuple[Expr, ...]:
    return shape_of(value_of(argument)) if isinstance(argument, fx.Node) else ()
