"""Which blocks to route, and at which capacity, when they are routed together.

What several routed blocks cost is not the sum of what each costs alone, so each is measured with those before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from modpass.errors import InputError
from modpass.record import evaluated
from modpass.training.calibration import check_budget, listed
from modpass.training.cost import counted
from modpass.training.losses import routed_blocks
from modpass.training.stream import Loss, call
from modpass.training.together import Together, at_capacities

__all__ = ["PickStep", "Picked", "pick_blocks"]

_ROUNDING = 1e-9  # of shares that were summed step by step


@dataclass(frozen=True)
class PickStep:
    """One block whose capacity was lowered. share: the operations that are left, of the dense model's; rise: of the
    loss over the dense model's, both with all earlier steps in force.
    """

    block: str
    capacity: float
    share: float
    rise: float


@dataclass(frozen=True)
class Picked:
    """The steps of ``pick_blocks`` in the order in which they were taken: each beginning of them is a choice too."""

    steps: tuple[PickStep, ...]
    blocks: tuple[str, ...]

    def capacities(self, budget: float = 0.0) -> dict[str, float]:
        """The capacity of each block to route, in the order in which they run, after the first step that is within
        the budget, or the last; 0: it is dropped. For ``mod_transform(capacity=found, blocks=list(found))``.

        >>> Picked((PickStep("b", 0.5, 0.9, 0.1), PickStep("a", 0.5, 0.8, 0.3)), ("a", "b")).capacities(0.9)
        {'b': 0.5}
        """
        found = {s.block: s.capacity for s in self._within(budget)}
        return {n: found[n] for n in self.blocks if n in found}

    def _within(self, budget: float) -> Sequence[PickStep]:
        last = next((i for i, s in enumerate(self.steps, 1) if s.share <= budget + _ROUNDING), len(self.steps))
        return self.steps[:last]


@torch.no_grad()
def pick_blocks(
    model: nn.Module,
    batches: Iterable[Any],
    budget: float,
    *,
    capacities: Sequence[float] = (0.5, 0.25, 0.125),
    loss: Loss | None = None,
) -> Picked:
    """Lower capacities step by step until the operations are ``budget`` of the dense model's; change nothing.

    Each step lowers one block to its next capacity, or to the last at once: whatever raises the loss least for the
    operations that it saves, with all earlier steps in force. A move is measured anew only when what was last found
    of it makes it the next one (lazy greedy, Minoux 1978): it mostly gets dearer as others are routed.

    Args:
        model: a routed model, every candidate a routed block, with routers that are trained or calibrated.
        batches: what it is called with, as for ``calibrate``; others than those that routers were fitted on.
        budget: the share of the dense model's operations at which to stop.
        capacities: which a block may have, from large to small; 0 drops it. ``(0.25,)`` routes every picked block
            alike, ``(0,)`` picks layers to drop.
        loss: of ``(output, batch)``; None: the relative squared change of the model's first output.

    Raises:
        InputError: there are no batches, capacities do not fall, or the budget is out of reach.

    >>> from modpass.decode.example import tiny_decoder
    >>> pick_blocks(tiny_decoder(True), [torch.arange(8)[None]], 0.9, capacities=(0.5,)).capacities()
    {'blocks.1': 0.5}
    """
    given, levels = listed(batches), _levels(capacities)
    check_budget(budget)
    with evaluated(model), torch.compiler.set_stance("force_eager"):
        return _descend(getattr(model, "_orig_mod", model), given, budget, levels, loss)


def _descend(model: nn.Module, batches: list[Any], budget: float, levels: Sequence[float], loss: Loss | None) -> Picked:
    saved = _savings(model, batches[0], levels)
    _check_reach(saved, levels, budget)
    together, following = Together(model, batches, loss), dict(pairwise(levels))
    steps: list[PickStep] = []

    def measured(block: str, before: float, capacity: float) -> None:
        saves = saved[block][capacity] - saved[block].get(before, 0.0)
        if saves > 0:
            price = together.rise(block, capacity) / saves
            moves[block, capacity] = _Move(block, before, capacity, price, saves, len(steps))

    def offered(block: str, before: float) -> None:
        """Measure what a block may be lowered to."""
        for capacity in {following[before], levels[-1]} if before > levels[-1] else ():
            measured(block, before, capacity)

    share, moves = 1.0, dict[tuple[str, float], _Move]()
    for name in saved:
        offered(name, 1.0)
    while share > budget + _ROUNDING:
        best = min(moves.values(), key=lambda m: m.price)
        if best.step < len(steps):
            measured(best.block, best.before, best.capacity)
            continue
        share -= best.saves
        together.set(best.block, best.capacity)
        steps.append(PickStep(best.block, best.capacity, share, together.loss - together.dense))
        moves = {k: m for k, m in moves.items() if m.block != best.block}
        if share > budget + _ROUNDING:
            offered(best.block, best.capacity)
    return Picked(tuple(steps), tuple(saved))


@dataclass(frozen=True)
class _Move:
    """A capacity that a block may have next. price: the loss's rise for what it saves,
    found after so many steps.
    """

    block: str
    before: float
    capacity: float
    price: float
    saves: float
    step: int


def _levels(capacities: Sequence[float]) -> list[float]:
    levels = [1.0, *map(float, capacities)]
    if len(levels) < 2 or any(a <= b for a, b in pairwise(levels)) or levels[-1] < 0:
        raise InputError(f"capacities are {list(capacities)}; give one or more below 1, from large to small; 0 drops")
    return levels


def _savings(model: nn.Module, batch: Any, levels: Sequence[float]) -> Mapping[str, dict[float, float]]:
    """By block and capacity, the operations saved, as a share of the dense model's."""
    found: dict[str, dict[float, float]] = {n: {} for n in routed_blocks(model)}
    for level in levels[1:]:
        # A block that is dropped is counted at some capacity, for what it takes when dense.
        with at_capacities(model, dict.fromkeys(found, level or 0.5)):
            total, blocks = counted(model, partial(call, model, batch))
        for name, (dense, routed) in blocks.items():
            found[name][level] = (dense - (routed if level else 0)) / total
    return found


def _check_reach(saved: Mapping[str, dict[float, float]], levels: Sequence[float], budget: float) -> None:
    least = 1 - sum(max(0.0, s[levels[-1]]) for s in saved.values())
    if least > budget:
        raise InputError(
            f"budget is {budget:g}, but with every block at a capacity of {levels[-1]:g} {least:.3g} of the operations "
            "are left; give a larger budget or a smaller capacity"
        )
