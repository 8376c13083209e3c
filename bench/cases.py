"""What is measured: one model at one fixed shape, dense beside routed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from modpass.errors import InputError
from modpass.parts import Parts
from modpass.routing import Gate, Selection

__all__ = ["CASES", "Case"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One model at one fixed shape, and how its blocks are routed.

    Args:
        model: what :func:`modpass.bench.load_model` accepts.
        batch: number of sequences.
        sequence: tokens per sequence; None where the model's own inputs fix it (a vision transformer).
        capacity: share of the tokens that a routed block takes, in (0, 1].
        every: every so-manyth block is routed.
        gate: how the router's score scales a block's update.
        selection: how tokens are chosen.
        parts: whether whole blocks are routed, or the attention or MLP of each.
        dtype: of the weights: float32, float16 or bfloat16.
        dims: sizes of further input dims by the names in ``RoutedModel.inputs``.
        seed: of the routers' random weights, where the model brings no trained ones.

    Raises:
        InputError: a size is below 1, or the dtype is none of the three.

    >>> Case("minilm-l6", sequence=256).capacity
    0.125
    """

    model: str
    batch: int = 1
    sequence: int | None = 1024
    capacity: float = 0.125
    every: int = 2
    gate: Gate = "linear"
    selection: Selection = "expert_choice"
    parts: Parts = "block"
    dtype: str = "float32"
    dims: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = {"batch": self.batch, "sequence": self.sequence, "every": self.every, **self.dims}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise InputError(f"{name} is {size}; it must be at least 1")
        if self.dtype not in _DTYPES:
            raise InputError(f"dtype is '{self.dtype}'; it may be {', '.join(_DTYPES)}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it.

        >>> Case("minilm-l6", dtype="float16").torch_dtype
        torch.float16
        """
        return _DTYPES[self.dtype]


CASES: dict[str, Case] = {
    "smollm2-135m": Case("smollm2-135m", sequence=1024),
    "minilm-l6": Case("minilm-l6", sequence=256),
    "dinov2-small": Case("dinov2-small", sequence=None),
}
