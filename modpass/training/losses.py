"""Losses of routing, from what routed blocks decided in the last forward.

Shapes: B batch, S sequence, k chosen tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modpass.errors import InputError
from modpass.functional import rank_scores, select, slots
from modpass.routing import LastForward, RoutedBlock

__all__ = ["RoutingLosses", "last_forward", "membership", "real_mean", "routed_blocks", "routing_losses"]


@dataclass(frozen=True)
class RoutingLosses:
    """The means over real tokens and blocks, and their weighted sum.

    router: binary cross-entropy of the router's scores against the top-k membership; predictor: the same of the
    predictor's logits; z_loss: mean square of the router's scores.
    """

    router: Tensor
    predictor: Tensor
    z_loss: Tensor
    total: Tensor


def routing_losses(
    model: nn.Module, *, router: float | None = None, predictor: float = 1.0, z_loss: float = 0.0
) -> RoutingLosses:
    """What to add to the model's own loss, from its last forward in training mode.

    The two ways of the paper's section 3.5 to decide causally: the router's own score (its loss reaches the whole
    model), or a predictor beside it (``mod_transform(predictor=True)``; its loss reaches the predictor alone).
    Padding tokens do not count. Use ``total``, or weigh the parts yourself.

    Args:
        model: a routed model, or a wrapper of one (DDP, FSDP, ``torch.compile``).
        router: weight of the router's loss; None: 0 where every block has a predictor, else 0.01.
        predictor: weight of the predictors' loss.
        z_loss: weight of the squared scores, which keeps them small.

    Raises:
        InputError: the model has no routed block, or one that has not run yet.

    >>> from modpass.decode.example import tiny_decoder
    >>> model = tiny_decoder(True).train()
    >>> out = model(torch.zeros(1, 8, dtype=torch.int64)); routing_losses(model).router.shape
    torch.Size([])
    """
    blocks = routed_blocks(model)
    bce: list[Tensor] = []
    predicted: list[Tensor] = []
    squares: list[Tensor] = []
    for name, block in blocks.items():
        last = last_forward(name, block)
        target = membership(block, last).float()
        bce.append(real_mean(_bce(last.scores, target), last.keep))
        squares.append(real_mean(last.scores.square(), last.keep))
        if block.predictor is not None:
            predicted.append(real_mean(_bce(last.logits, target), last.keep))
    if router is None:
        router = 0.0 if len(predicted) == len(blocks) else 0.01
    none = bce[0].new_zeros(())
    own, guessed, size = _mean(bce), _mean(predicted) if predicted else none, _mean(squares)
    # A part of weight zero is left out, not multiplied: zero times infinity is NaN.
    weighted = [w * part for w, part in ((router, own), (predictor, guessed), (z_loss, size)) if w]
    return RoutingLosses(own, guessed, size, torch.stack(weighted).sum() if weighted else none)


def routed_blocks(model: nn.Module) -> dict[str, RoutedBlock]:
    """The routed blocks of a model by name, whatever wraps it.

    Raises:
        InputError: there is none.
    """
    found = {m.name: m for m in model.modules() if isinstance(m, RoutedBlock)}
    if not found:
        raise InputError(f"the {type(model).__name__} has no routed block; make it with modpass.mod_transform")
    return found


def last_forward(name: str, block: RoutedBlock) -> LastForward:
    """What the block decided in its last forward.

    Raises:
        InputError: it has not run yet.
    """
    if block.last is None:
        raise InputError(f"block '{name}' has not run yet; call the model first")
    return block.last


def membership(block: RoutedBlock, last: LastForward) -> Tensor:
    """Which tokens the router's top-k takes, ``[B, S]`` bool, also where the block selected otherwise."""
    scores = last.scores.detach()
    index = last.index
    if block.selection != "expert_choice":
        index = select(rank_scores(scores, last.keep), slots(block.capacity, scores.shape[1]))
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, index, True)


def real_mean(value: Tensor, keep: Tensor | None) -> Tensor:
    """The mean over real tokens of ``[B, S]``; zero where there are none.

    >>> real_mean(torch.tensor([[1.0, 5.0]]), torch.tensor([[1, 0]])).item()
    1.0
    """
    if keep is None:
        return value.mean()
    real = keep != 0
    return torch.where(real, value, 0.0).sum() / real.sum().clamp(min=1)


def _bce(logits: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits.float(), target, reduction="none")


def _mean(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).mean()
