"""Capacities and gates that change while a model trains, and go on from a checkpoint where they were."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import nn

from modpass.errors import InputError, StateError
from modpass.functional import check_capacity
from modpass.routing import RoutedBlock, choose_option
from modpass.training.losses import routed_blocks

__all__ = ["Schedule", "Shape", "capacity_schedule", "gate_schedule"]

Shape = Literal["linear", "cosine"]


class Schedule:
    """A number that goes from ``start`` to ``end`` in ``steps`` calls of ``step()``, set on every routed block.

    It starts after ``delay`` steps; ``levels`` rounds it to so many values on the way, as each new capacity is a
    new shape, for which ``torch.compile`` compiles again. ``state_dict`` and ``load_state_dict`` are those of
    PyTorch's learning rate schedulers.
    """

    def __init__(
        self,
        blocks: Mapping[str, RoutedBlock],
        attribute: str,
        start: float,
        end: float,
        steps: int,
        *,
        delay: int = 0,
        levels: int | None = None,
        shape: Shape = "linear",
    ) -> None:
        for name, value, least in (("steps", steps, 1), ("delay", delay, 0), ("levels", levels or 2, 2)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name} is {value!r}; it must be a whole number of {least} or more")
        choose_option("shape", shape, Shape)
        self.blocks, self.attribute = dict(blocks), attribute
        self.start, self.end, self.steps = float(start), float(end), steps
        self.delay, self.levels, self.shape = delay, levels, shape
        self.count = 0
        self._set()

    @property
    def value(self) -> float:
        """The number as it is now."""
        way = min(1.0, max(0, self.count - self.delay) / self.steps)
        if self.shape == "cosine":
            way = (1 - math.cos(math.pi * way)) / 2
        if self.levels is not None:
            way = math.floor(way * (self.levels - 1) + 1e-9) / (self.levels - 1)
        return self.start + way * (self.end - self.start) if way < 1 else self.end

    def step(self) -> float:
        """Go one step on; returns the number. Call it once per optimizer step."""
        self.count += 1
        self._set()
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and texts; the blocks are not among them."""
        names = ("attribute", "start", "end", "steps", "delay", "levels", "shape", "count")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, and set the blocks to it.

        Raises:
            StateError: it is not the state of such a schedule.
        """
        own = self.state_dict()
        if set(state) != set(own) or state["attribute"] != self.attribute:
            held = ", ".join(map(str, state)) or "nothing"
            raise StateError(f"this is no state of a schedule of {self.attribute}: it holds {held}")
        self.__dict__.update(state)
        self._set()

    def _set(self) -> None:
        for block in self.blocks.values():
            setattr(block, self.attribute, self.value)


def capacity_schedule(
    model: nn.Module, start: float, end: float, steps: int, *, blocks: Callable[[str], bool] = bool, **options: Any
) -> Schedule:
    """Let the capacity of the routed blocks (of those whose name ``blocks`` picks) go from ``start`` to ``end``.

    Options are those of ``Schedule``: ``delay``, ``levels``, ``shape``.

    Raises:
        CapacityError: an end is no capacity.
        InputError: the model has no routed block, or an option is not what is allowed.

    >>> from modpass.decode.example import tiny_decoder
    >>> schedule = capacity_schedule(tiny_decoder(True), 1.0, 0.5, steps=2)
    >>> [schedule.value, schedule.step(), schedule.step(), schedule.step()]
    [1.0, 0.75, 0.5, 0.5]
    """
    for end_point in (start, end):
        check_capacity(end_point)
    return Schedule(_picked(model, blocks), "capacity", start, end, steps, **options)


def gate_schedule(
    model: nn.Module,
    steps: int,
    *,
    start: float = 0.0,
    end: float = 1.0,
    blocks: Callable[[str], bool] = bool,
    **options: Any,
) -> Schedule:
    """Let the weight of a chosen token go from 1, as a pretrained block knows it, to what the gate makes of its score.

    ``r = 1 + mix * (gate(score) - 1)``, ``mix`` from ``start`` to ``end``. Options are those of ``Schedule``.

    Raises:
        InputError: a block has the unit gate, which has no weight, or the model has no routed block.

    >>> from modpass.decode.example import tiny_decoder
    >>> model = tiny_decoder(True)
    >>> schedule = gate_schedule(model, steps=4)
    >>> (model.routed_blocks["blocks.1"].gate_mix, schedule.step())
    (0.0, 0.25)
    """
    found = _picked(model, blocks)
    for name, block in found.items():
        if block.gate == "unit":
            raise InputError(f"block '{name}' has the unit gate, whose weight is always 1; set its gate first")
    if not 0 <= start <= 1 or not 0 <= end <= 1:
        raise InputError(f"a gate's mix goes from {start!r} to {end!r}; both must be in [0, 1]")
    return Schedule(found, "gate_mix", start, end, steps, **options)


def _picked(model: nn.Module, blocks: Callable[[str], bool]) -> dict[str, RoutedBlock]:
    found = routed_blocks(model)
    picked = {n: b for n, b in found.items() if blocks(n)}
    if not picked:
        raise InputError(f"no routed block is picked; there are: {', '.join(found)}")
    return picked
