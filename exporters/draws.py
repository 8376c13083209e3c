"""Inputs that a seed gives again, on any machine and with any version: raw bits of a counter-based generator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from modpass.exporters.shapes import FixedShape, input_shapes
from modpass.model import RoutedModel

__all__ = ["Draw", "drawn", "draws"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Draw:
    """How one input is drawn: whole numbers of ``low`` to ``high``, or, where they are None, noise of variance 1."""

    name: str
    shape: tuple[int, ...]
    low: int | None = None
    high: int | None = None
    truth: bool = False


def draws(model: RoutedModel, shape: FixedShape) -> tuple[Draw, ...]:
    """How the inputs of a model are drawn: ids within the range of the example inputs, masks like theirs, noise.

    Raises:
        InputError: a size is missing or names no dim.
    """
    shapes = input_shapes(model, shape)
    return tuple(_draw(s.name, shapes[s.name], s.dtype, s.example) for s in model.inputs)


def _draw(name: str, shape: tuple[int, ...], dtype: torch.dtype, example: torch.Tensor | None) -> Draw:
    if dtype.is_floating_point:
        return Draw(name, shape)
    if dtype == torch.bool:
        fill = int(example is not None and bool(example.any()))
        return Draw(name, shape, fill, fill, truth=True)
    if example is None:
        return Draw(name, shape, 1, 1)
    return Draw(name, shape, int(example.min()), int(example.max()))


def drawn(how: Sequence[Draw], seed: int) -> dict[str, Array]:
    """The inputs by name: int64, bool or float32.

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (Philox); numpy keeps its raw stream stable.

    >>> drawn([Draw("ids", (1, 6), 0, 9)], seed=0)["ids"].tolist()
    [[9, 8, 9, 6, 3, 5]]
    """
    found: dict[str, Array] = {}
    for i, d in enumerate(how):
        raw = np.random.Philox(key=[seed, i]).random_raw(math.prod(d.shape)).reshape(d.shape)
        if d.low is None or d.high is None:
            unit = (raw >> np.uint64(40)).astype(np.float64) / 2**24
            found[d.name] = ((unit - 0.5) * math.sqrt(12)).astype(np.float32)
        else:
            whole = (raw % np.uint64(d.high - d.low + 1)).astype(np.int64) + d.low
            found[d.name] = whole.astype(np.bool_) if d.truth else whole
    return found
