"""``mod_transform(blocks="auto")``: route the blocks that cost least under a budget of operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from modpass.errors import InputError
from modpass.model import RoutedModel
from modpass.training.calibration import calibrate
from modpass.transform import mod_transform

__all__ = ["route_within"]


def route_within(
    model: nn.Module | ExportedProgram,
    batches: Iterable[Any],
    budget: float,
    capacity: float | Mapping[str, float],
    **options: Any,
) -> RoutedModel:
    """Route every block, calibrate, and route again those that were picked, with the fitted routers.

    Options are those of ``mod_transform``.

    Raises:
        InputError: the budget cannot be reached, or nothing has to be routed for it.

    >>> from modpass.decode.example import tiny_decoder
    >>> ids = torch.arange(10).reshape(1, 10)
    >>> len(route_within(tiny_decoder(), [ids], 0.8, 0.25, example_inputs=(ids,)).routed_blocks)
    1
    """
    wide = mod_transform(model, capacity, every=1, **options)
    picked = calibrate(wide, batches, budget=budget).picked
    if not picked:
        raise InputError(f"budget is {budget:g}, which the dense model meets without routing; give a smaller one")
    found = {n: wide.routed_blocks[n].router.weight.detach().clone() for n in picked}
    if isinstance(capacity, Mapping):
        capacity = {n: capacity[n] for n in picked}
    routed = mod_transform(model, capacity, blocks=picked, **options)
    with torch.no_grad():
        for name, weight in found.items():
            routed.routed_blocks[name].router.weight.copy_(weight)
    return routed
