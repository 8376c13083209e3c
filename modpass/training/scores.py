"""How much a token needs a block, told without training: functions of the stream before and after the block.

Each takes ``x`` and ``y`` ``[B, S, D]`` in float32 and returns ``[B, S]``; larger: the token should go through. One
with a third argument that must be given gets the gradient of a loss after the block.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modpass.errors import InputError

__all__ = [
    "Score",
    "cosine_change",
    "first_token_orthogonality",
    "hidden_norm",
    "log_change",
    "loss_sensitivity",
    "relative_change",
    "takes_gradient",
]

Score = Callable[[Tensor, Tensor], Tensor] | Callable[[Tensor, Tensor, Tensor], Tensor]


def takes_gradient(score: Score) -> bool:
    """Whether a score takes the gradient of a loss as its third argument: it has three that must be given.

    Raises:
        InputError: it cannot be called.

    >>> takes_gradient(loss_sensitivity), takes_gradient(log_change)
    (True, False)
    """
    if not callable(score):
        raise InputError(
            f"score is {score!r}; it must be a function of a block's stream before and after, or of the gradient too"
        )
    try:
        given = inspect.signature(score.forward if isinstance(score, nn.Module) else score).parameters.values()
    except ValueError:  # a builtin that does not say what it takes
        return False
    needed = [p for p in given if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) == 3


def loss_sensitivity(x_BSD: Tensor, y_BSD: Tensor, gradient_BSD: Tensor) -> Tensor:
    """How much the loss can change, to first order, where the token passes by: the size of what the block adds
    times that of the gradient.

    Of it the square root, so that a few huge values do not rule the fit. Source: the first-order criterion of
    Molchanov et al., arXiv 1611.06440, with the product of sizes in place of the inner product, whose sign is noise.

    >>> loss_sensitivity(torch.zeros(1, 1, 4), torch.ones(1, 1, 4), torch.full((1, 1, 4), 2.0)).item()
    2.8284270763397217
    """
    return (_norm(y_BSD - x_BSD) * _norm(gradient_BSD)).sqrt()


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
