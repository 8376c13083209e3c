"""The decoder of the training studies: pre-norm, rotary positions, bytes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["StudyDecoder"]


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        for branch in (self.out, self.down):
            nn.init.normal_(branch.weight, std=(2 * width * layers) ** -0.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(_turned(q, cos, sin), _turned(k, cos, sin), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class StudyDecoder(nn.Module):
    """Logits ``[B, S, 128]`` of ASCII bytes ``[B, S]``.

    >>> StudyDecoder(16, layers=2)(torch.zeros(1, 5, dtype=torch.int64)).shape
    torch.Size([1, 5, 128])
    """

    def __init__(self, width: int, layers: int, vocabulary: int = 128) -> None:
        super().__init__()
        heads = max(1, width // 32)
        self.rates: int = width // heads // 2
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        self.blocks = nn.ModuleList(_Block(width, heads, layers) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the byte after each."""
        place = torch.arange(ids.shape[1], device=ids.device)[:, None]
        rate: Tensor = 10_000.0 ** (-torch.arange(self.rates, device=ids.device) / self.rates)
        angle = place * rate
        cos, sin = angle.cos(), angle.sin()
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)
