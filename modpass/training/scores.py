"""How much a token needs a block, told without training: functions of the stream before and after the block.

Each takes ``x`` and ``y`` ``[B, S, D]`` in float32 and returns ``[B, S]``; larger: the token should go through.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["cosine_change", "first_token_orthogonality", "hidden_norm", "log_change", "relative_change"]


def log_change(x_BSD: Tensor, y_BSD: Tensor) -> Tensor:
    """The logarithm of the size of what the block adds: a few tokens with huge changes do not rule the fit.

    >>> log_change(torch.ones(1, 1, 4), torch.full((1, 1, 4), 1.5)).item()
    0.0
    """
    return _norm(y_BSD - x_BSD).clamp(min=1e-12).log()


def relative_change(x_BSD: Tensor, y_BSD: Tensor) -> Tensor:
    """The size of what the block adds, over the size of the stream.

    >>> relative_change(torch.ones(1, 1, 4), torch.full((1, 1, 4), 3.0)).item()
    2.0
    """
    return _norm(y_BSD - x_BSD) / _norm(x_BSD).clamp(min=1e-12)


def cosine_change(x_BSD: Tensor, y_BSD: Tensor) -> Tensor:
    """How far the block turns the stream: one minus the cosine between before and after.

    >>> cosine_change(torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 2.0]]])).item()
    1.0
    """
    return 1 - F.cosine_similarity(x_BSD, y_BSD, -1)


def hidden_norm(x_BSD: Tensor, y_BSD: Tensor) -> Tensor:
    """The size of the stream before the block.

    >>> hidden_norm(torch.tensor([[[3.0, 4.0]]]), torch.zeros(1, 1, 2)).item()
    5.0
    """
    return _norm(x_BSD)


def first_token_orthogonality(x_BSD: Tensor, y_BSD: Tensor) -> Tensor:
    """How little a token looks like the first, on which attention rests when it has nothing to look at.

    Source: attention sinks, Xiao et al., arXiv 2309.17453.

    >>> first_token_orthogonality(torch.eye(2)[None], torch.eye(2)[None]).tolist()
    [[0.0, 1.0]]
    """
    return 1 - F.cosine_similarity(x_BSD, x_BSD[:, :1], -1).abs()


def _norm(x_BSD: Tensor) -> Tensor:
    norm_BS: Tensor = torch.linalg.vector_norm(x_BSD, dim=-1)
    return norm_BS
