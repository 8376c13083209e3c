"""What the study of pretrained models finds on its calibration rows: routers, and which blocks to route or to drop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

from torch import Tensor

from modpass import RoutedModel
from modpass.bench.adapt_setup import Run, next_token_loss
from modpass.bench.adapt_text import Text
from modpass.training import Picked, PickStep, block_costs, loss_sensitivity, pick_blocks, skipped
from modpass.training.fit import fit_routers
from modpass.training.together import at_capacities

__all__ = ["calibration_rows", "cost_alone", "fitted", "pick_record", "picked_from", "picked_together"]

Tell = Callable[[int, int], None]


def calibration_rows(texts: Sequence[Text], run: Run) -> tuple[list[Tensor], list[Tensor]]:
    """Batches to fit routers on, and others to compare blocks on; both from the part that nothing is evaluated on."""
    count = run.calibration_rows + run.compared_rows
    rows = [t.rows(count, run.sequence) for t in texts]
    # Taken from all over the text, as those for the fit are.
    place = [round((i + 0.5) * count / run.compared_rows - 0.5) for i in range(run.compared_rows)]
    others = [i for i in range(count) if i not in place]
    return [b for r in rows for b in r[others].split(run.batch)], [b for r in rows for b in r[place].split(run.batch)]


def fitted(model: RoutedModel, texts: Sequence[Text], run: Run) -> dict[str, Tensor]:
    """The router of each block, fitted to how much the loss depends on what it adds to each token."""
    fit, compared = calibration_rows(texts, run)
    with at_capacities(model, dict.fromkeys(model.routed_blocks, run.capacity)):
        fit_routers(model, fit, loss_sensitivity, held_out=compared, loss=next_token_loss)
    return {n: b.router.weight.detach().clone() for n, b in model.routed_blocks.items()}


def cost_alone(model: RoutedModel, texts: Sequence[Text], run: Run, capacity: float, tell: Tell) -> dict[str, float]:
    """What the loss rises by with each block alone routed at a capacity, or dropped at 0."""
    _, compared = calibration_rows(texts, run)
    loss = _counting(tell, len(compared) * (1 + len(model.routed_blocks)))

    def changed(name: str) -> AbstractContextManager[Any]:
        return at_capacities(model, {name: capacity}) if capacity else skipped(model, [name])

    return block_costs(model, compared, loss, changed)


def picked_together(
    model: RoutedModel, texts: Sequence[Text], run: Run, capacities: Sequence[float], budget: float, tell: Tell
) -> Picked:
    """Blocks and their capacities, each picked with those before it in force."""
    _, compared = calibration_rows(texts, run)
    return pick_blocks(model, compared, budget, capacities=capacities, loss=_counting(tell, 0))


def pick_record(picked: Picked) -> dict[str, Any]:
    """As plain values; ``picked_from`` reads it.

    >>> picked = Picked((PickStep("a", 0.5, 0.9, 0.1),), ("a",))
    >>> picked_from(pick_record(picked)) == picked
    True
    """
    return asdict(picked)


def picked_from(record: dict[str, Any]) -> Picked:
    """See ``pick_record``."""
    return Picked(tuple(PickStep(**s) for s in record["steps"]), tuple(record["blocks"]))


def _counting(tell: Tell, total: int) -> Callable[[Any, Tensor], Tensor]:
    done = 0

    def loss(output: Any, ids: Tensor) -> Tensor:
        nonlocal done
        done += 1
        tell(done, total)
        return next_token_loss(output, ids)

    return loss
