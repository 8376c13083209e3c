"""When two outputs are equal, and whether a model attends at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TOLERANCE", "AttentionWatch", "Wrong", "check_equal", "floats", "gap"]

TOLERANCE = 1e-4
# The last is the fused layer of nn.TransformerEncoder.
_ATTENTION = ("softmax", "attention", "transformer_encoder_layer")


class Wrong(Exception):
    """Two things that should be equal are not."""


class AttentionWatch(TorchDispatchMode):
    """Notes whether anything attends: a softmax over a tensor of three or more dims."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attends = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if any(a in name for a in _ATTENTION) and isinstance(args[0], Tensor) and args[0].dim() >= 3:
            self.attends = True
        return func(*args, **(kwargs or {}))


def floats(output: Any) -> list[Tensor]:
    """The floating-point tensors of an output, in order; empty ones left out.

    >>> len(floats({"logits": torch.zeros(2), "ids": torch.zeros(2, dtype=torch.int64)}))
    1
    """
    leaves = (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.is_floating_point() and leaf.numel()]


def check_equal(found: Any, wanted: Any, what: str) -> None:
    """Compare every floating-point tensor of two outputs.

    Raises:
        Wrong: a tensor is off by more than the tolerance, or there is one more or less; says how far from ``what``.

    >>> check_equal(torch.ones(2), torch.tensor([1.0, 2.0]), "the dense model")
    Traceback (most recent call last):
    modpass.bench.coverage_checks.Wrong: output 0 is off from the dense model by 0.5 of its largest value
    """
    mine, theirs = floats(found), floats(wanted)
    if len(mine) != len(theirs):
        raise Wrong(f"{len(mine)} outputs, but {what} has {len(theirs)}")
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        off = gap(a, b)
        if not off <= TOLERANCE:
            raise Wrong(f"output {i} is off from {what} by {off:.2g} of its largest value")


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference over the largest finite value; equal infinities, and two NaN, differ by nothing.

    Raises:
        Wrong: the shapes differ.

    >>> gap(torch.tensor([1.0, float("-inf")]), torch.tensor([2.0, float("-inf")]))
    0.5
    """
    if a.shape != b.shape:
        raise Wrong(f"a tensor is {list(a.shape)} in place of {list(b.shape)}")
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, torch.zeros_like(a), (a - b).abs())
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return float(difference.max()) / (scale or 1.0)
