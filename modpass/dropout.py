"""Attention whose dropout follows ``train()`` and ``eval()``."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["AttentionDropout"]


class AttentionDropout(nn.Module):
    """Scaled dot-product attention with a dropout rate that holds in training mode alone."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Attention of ``query`` ``[B, H, Q, D]`` over ``key`` and ``value`` ``[B, H, K, D]``."""
        rate = self.rate if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, dropout_p=rate, **options)
