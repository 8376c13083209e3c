"""Routers for a pretrained model without training: fitted to how much each block changes each token.

Shapes: B batch, S sequence, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modpass.errors import InputError
from modpass.record import evaluated
from modpass.training.cost import counted
from modpass.training.fit import fit_routers
from modpass.training.losses import routed_blocks
from modpass.training.measure import block_costs
from modpass.training.scores import Score, relative_change
from modpass.training.stream import Loss, call

__all__ = ["BlockCalibration", "Calibration", "calibrate", "check_budget", "listed", "pick"]


@dataclass(frozen=True)
class BlockCalibration:
    """One block. agreement: of the tokens with the largest true scores, the share that the fitted router takes;
    lost: what routing this block alone costs; flops: its operations, dense and routed.
    """

    agreement: float
    lost: float
    flops: tuple[int, int]


@dataclass(frozen=True)
class Calibration:
    """What ``calibrate`` found; flops: the whole model's operations when nothing is routed.

    picked: the blocks to route under the budget (all of them where none was given), in the order in which they run.
    """

    blocks: Mapping[str, BlockCalibration]
    flops: int
    picked: tuple[str, ...]

    def share(self, names: Iterable[str] | None = None) -> float:
        """The operations with these blocks routed (None: the picked ones), as a share of the dense model's."""
        routed = [self.blocks[n].flops for n in (self.picked if names is None else names)]
        return 1 - sum(dense - own for dense, own in routed) / self.flops


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    score: Score = relative_change,
    loss: Loss | None = None,
    budget: float | None = None,
    first_token: bool = True,
    held_out: Iterable[Any] | None = None,
) -> Calibration:
    """Fit every router by least squares to how much its block changes each token, and say what routing costs.

    A router's target is ``score`` less the value that its capacity's share of the row exceeds, so that its sign is
    the causal decision. Blocks are fitted on the dense model's stream; each block's cost is measured with it alone
    routed. Several blocks together may cost far more than the sum, as the same tokens tend to pass by all of them.

    Args:
        model: a routed model; with ``gate="unit"`` chosen tokens are computed as the dense model does.
        batches: what it is called with: dicts, tuples or single tensors.
        score: from the stream before and after a block, ``[B, S, D]`` each, to ``[B, S]``; ``modpass.training`` has
            ``relative_change``, ``log_change``, ``cosine_change``, ``hidden_norm`` and ``first_token_orthogonality``.
            One that takes a third argument (``loss_sensitivity``) gets the gradient of ``loss`` after the block.
        loss: of ``(output, batch)``; a block's cost is what it rises by. None: the relative squared change of
            the model's first output.
        budget: pick blocks, those that cost least for what they save first, until the operations are this share of
            the dense model's. ``mod_transform(blocks="auto", budget=..., calibration=batches)`` routes these alone.
        first_token: count the first real token of each row as the one that needs the block most. Pretrained
            attention rests on it when it has nothing to look at (Xiao et al., arXiv 2309.17453), though blocks
            hardly change it.
        held_out: batches on which agreement and costs are measured; None: those that routers are fitted on. A
            router has as many weights as the stream is wide, so that it looks good on fewer tokens than those.

    Raises:
        InputError: there are no batches, a score takes a gradient and the loss has none, or routing every block does
            not reach the budget.

    >>> from modpass.decode.example import tiny_decoder
    >>> found = calibrate(tiny_decoder(True), [torch.arange(10).reshape(1, 10)])
    >>> list(found.blocks), found.share() < 1
    (['blocks.1'], True)
    """
    given, blocks = listed(batches), routed_blocks(model)
    others = given if held_out is None else listed(held_out)
    inner = getattr(model, "_orig_mod", model)
    # what was compiled runs past hooks that come later
    with evaluated(model), torch.compiler.set_stance("force_eager"):
        agreements = fit_routers(inner, given, score, first_token, others, loss)
        costs = block_costs(inner, others, loss)
        total, flops = counted(inner, partial(call, inner, given[0]))
    found = {n: BlockCalibration(agreements[n], costs[n], flops[n]) for n in blocks}
    picked = tuple(found) if budget is None else pick(found, total, budget)
    return Calibration(found, total, picked)


def listed(batches: Iterable[Any]) -> list[Any]:
    """The batches as a list.

    Raises:
        InputError: there are none, or one is given as it is.
    """
    if isinstance(batches, Tensor | Mapping):
        raise InputError(f"batches is one {type(batches).__name__}; give a list of batches, such as [batch]")
    given = list(batches)
    if not given:
        raise InputError("there are no batches to calibrate on")
    return given


# Budget


def pick(blocks: Mapping[str, BlockCalibration], flops: int, budget: float) -> tuple[str, ...]:
    """The blocks to route so that the operations are at most ``budget`` of ``flops``, cheapest per saving first.

    Raises:
        InputError: the budget is no share, or routing every block does not reach it.

    >>> block = BlockCalibration(1.0, 0.1, (50, 10))
    >>> pick({"a": block, "b": BlockCalibration(1.0, 0.0, (50, 10))}, 100, 0.6)
    ('b',)
    """
    check_budget(budget)
    least = 1 - sum(b.flops[0] - b.flops[1] for b in blocks.values()) / flops
    if least > budget:
        raise InputError(
            f"budget is {budget:g}, but with every block routed {least:.3g} of the operations are left; "
            "give a larger budget or a smaller capacity"
        )
    saved = {n: b.flops[0] - b.flops[1] for n, b in blocks.items() if b.flops[0] > b.flops[1]}
    picked, left = set[str](), float(flops)
    for name in sorted(saved, key=lambda n: blocks[n].lost / saved[n]):
        if left <= budget * flops:
            break
        picked.add(name)
        left -= saved[name]
    return tuple(n for n in blocks if n in picked)


def check_budget(budget: float) -> None:
    """Refuse what is no share of the dense model's operations.

    Raises:
        InputError: it is not in (0, 1].
    """
    if not 0 < budget <= 1:
        raise InputError(f"budget is {budget!r}; it must be in (0, 1]: the share of the dense model's operations")
