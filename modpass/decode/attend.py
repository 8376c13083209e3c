"""Attention of one new token over a cache, without a copy of the cache.

The cache is read as it is; the new token's scores and values are put in at its slot on the way. Shapes: B rows,
H heads, G query heads per key head, N slots of the cache, D head width. Scores may carry keys that are no tokens
(attention sinks) behind the N slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attend", "hide_later", "join_scores", "weigh"]


def _slot(slot_B: Tensor, like: Tensor) -> Tensor:
    """The slot of each row, shaped to compare with the last dim of ``like``, whose rows may hold heads too."""
    rows = like.shape[0] // slot_B.shape[0]
    slot = slot_B.repeat_interleave(rows) if rows > 1 else slot_B
    return slot.reshape(-1, *[1] * (like.dim() - 1))


def _is_new(slot_B: Tensor, like: Tensor) -> Tensor:
    return torch.arange(like.shape[-1], device=like.device) == _slot(slot_B, like)


def join_scores(cached: Tensor, new: Tensor, slot_B: Tensor) -> Tensor:
    """Scores ``[B, .., 1, N]`` against the cache, with those against the new token ``[B, .., 1, 1]`` at its slot.

    >>> join_scores(torch.zeros(1, 1, 3), torch.ones(1, 1, 1), torch.tensor([1])).flatten().tolist()
    [0.0, 1.0, 0.0]
    """
    return torch.where(_is_new(slot_B, cached), new, cached)


def hide_later(scores: Tensor, slot_B: Tensor, slots: int) -> Tensor:
    """Scores in which the slots behind the new token's own, which hold nothing yet, get no weight.

    >>> hide_later(torch.zeros(1, 1, 3), torch.tensor([0]), 2).softmax(-1).flatten().tolist()
    [0.5, 0.0, 0.5]
    """
    place = torch.arange(scores.shape[-1], device=scores.device)
    hidden = (place > _slot(slot_B, scores)) & (place < slots)
    low = torch.finfo(scores.dtype).min
    return scores.masked_fill(hidden, low).clamp(min=low)  # a row that a mask hides whole stays finite


def weigh(weights: Tensor, cached: Tensor, new: Tensor, slot_B: Tensor) -> Tensor:
    """The values ``[B, .., N, D]`` of the cache and ``[B, .., 1, D]`` of the new token, weighed ``[B, .., 1, N]``.

    >>> weigh(torch.ones(1, 1, 2), torch.ones(1, 2, 1), torch.full((1, 1, 1), 5.0), torch.tensor([0])).item()
    6.0
    """
    is_new = _is_new(slot_B, weights)
    own = torch.where(is_new, weights, 0).sum(-1, keepdim=True)
    return torch.matmul(torch.where(is_new, 0, weights), cached) + own * new


def attend(
    query: Tensor,
    new_key: Tensor,
    new_value: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_B: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product attention ``[B, H*G, 1, D]`` of one token over a cache ``[B, H, N, D]`` and itself.

    mask: as ``torch.nn.functional.scaled_dot_product_attention`` takes it, for one query: ``[.., 1, N]``.

    >>> one = torch.ones(1, 1, 1, 2)
    >>> attend(one, one, one, torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), torch.tensor([0])).flatten().tolist()
    [1.0, 1.0]
    """
    B, heads, _, width = query.shape
    H, N = keys.shape[1], keys.shape[2]
    q = query.reshape(B, H, heads // H, width) * (width**-0.5 if scale is None else scale)
    scores = join_scores(torch.matmul(q, keys.transpose(-1, -2)), (q * new_key).sum(-1, keepdim=True), slot_B)
    if mask is not None:
        mask = mask.reshape(mask.shape[0], H, heads // H, N) if mask.dim() == 4 and mask.shape[1] > 1 else mask
        low = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, low) if mask.dtype == torch.bool else scores + mask
    weights = hide_later(scores, slot_B, N).softmax(-1)
    if mask is not None and mask.dtype == torch.bool:
        weights = weights.masked_fill(~mask, 0.0)  # a row that sees nothing is zero, as the fused operator has it
    return weigh(weights, values, new_value, slot_B).reshape(B, heads, 1, values.shape[-1])
