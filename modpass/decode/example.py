"""A tiny decoder for the examples in docstrings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modpass.model import RoutedModel
from modpass.transform import mod_transform, trace

__all__ = ["Block", "tiny_decoder"]


class Block(nn.Module):
    """Attention of width 8 in two heads, by the fused operator."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The stream ``[B, S, 8]`` with what attention adds."""
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = x + self.out(y.transpose(1, 2).flatten(2))
        return out


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = x @ self.embed.weight.T
        return logits


def tiny_decoder(routed: bool = False) -> RoutedModel:
    """Two blocks of width 8 over 11 tokens, traced; ``routed``: the second with causal selection.

    >>> tiny_decoder()(torch.zeros(1, 5, dtype=torch.int64)).shape
    torch.Size([1, 5, 11])
    """
    ids = (torch.arange(10).reshape(2, 5),)
    model = _Decoder().eval()
    return mod_transform(model, 0.5, selection="causal", example_inputs=ids) if routed else trace(model, ids)
