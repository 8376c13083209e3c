"""The variants of a pretrained model that a study compares: whole, with layers dropped, or routed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from modpass import RoutedModel
from modpass.bench.flops import FlopCount, count_flops
from modpass.training import BlockCalibration, skipped
from modpass.training.calibration import pick

__all__ = ["Variant", "applied", "cheapest", "operations", "spaced"]


@dataclass(frozen=True)
class Variant:
    """One row of the study.

    layers: its operations are those of the model with so many layers dropped, or less if it is routed; how: "dense",
    "drop", "spaced" (dropped at equal distances) or "route"; parts: whole blocks, or the MLP of each; together: its
    blocks (and, routed, their capacities) were picked by what they cost together, else by what each costs alone, at
    ``capacity``; tune: what is trained afterwards: nothing, "routers", "lora" (on the text, routers too) or "distil"
    (the same, from the dense model).
    """

    name: str
    layers: int = 0
    how: Literal["dense", "drop", "spaced", "route"] = "dense"
    parts: Literal["block", "mlp"] = "block"
    together: bool = True
    capacity: float = 0.5
    tune: Literal["", "routers", "lora", "distil"] = ""


@contextmanager
def applied(model: RoutedModel, capacities: Mapping[str, float]) -> Iterator[RoutedModel]:
    """Inside, the named blocks are routed, or dropped at a capacity of 0; all others take every token."""
    with ExitStack() as stack:
        for name, block in model.routed_blocks.items():
            block.capacity = capacities.get(name) or 1.0
            stack.callback(setattr, block, "capacity", 1.0)
        stack.enter_context(skipped(model, [n for n, c in capacities.items() if c == 0]))
        yield model


def operations(model: RoutedModel, capacities: Mapping[str, float], ids: Tensor) -> int:
    """Counted operations with these blocks routed or dropped, for tokens ``[B, S]``."""
    with applied(model, capacities):
        return count_flops(model, {"input_ids": ids}).total


def spaced(blocks: list[str], layers: int) -> dict[str, float]:
    """Layers to drop at equal distances.

    >>> list(spaced(["a", "b", "c", "d"], 2))
    ['b', 'd']
    """
    step = len(blocks) / layers
    return {blocks[int((i + 0.5) * step)]: 0.0 for i in range(layers)}


def cheapest(
    model: RoutedModel, capacity: float, costs: Mapping[str, float], budget: int, ids: Tensor
) -> dict[str, float]:
    """The blocks to route (or to drop, at a capacity of 0) by what each costs alone.

    budget: the operations to come down to. Routing goes below it, dropping parts of layers stays above it: any
    doubt is to the favour of dropping.
    """
    blocks = list(model.routed_blocks)
    dense, changed = _counts(model, 1.0, ids), _counts(model, capacity, ids)
    if capacity:
        found = {n: BlockCalibration(1.0, costs[n], (dense.blocks[n], changed.blocks[n])) for n in blocks}
        return dict.fromkeys(pick(found, dense.total, budget / dense.total), capacity)
    names, left = list[str](), dense.total
    for name in sorted(blocks, key=costs.__getitem__):
        left -= dense.blocks[name]
        if left < budget:
            break
        names.append(name)
    return dict.fromkeys(names, 0.0)


def _counts(model: RoutedModel, capacity: float, ids: Tensor) -> FlopCount:
    """With every block changed; what one saves does not depend on the others."""
    blocks = list(model.routed_blocks)
    with applied(model, dict.fromkeys(blocks, capacity)):
        return count_flops(model, {"input_ids": ids}, blocks)
