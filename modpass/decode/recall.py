"""An operator that looks at earlier tokens, made of what a step remembers and this token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from modpass.mixing import name_of
from modpass.symbols import value_of

if TYPE_CHECKING:
    from modpass.decode.copy import StepCopy

__all__ = ["begin_with", "recall"]


def recall(copy: StepCopy, node: fx.Node) -> fx.Node:
    """A sum that goes on, or the operator on the last tokens and this one; ``copy.left`` keeps what is left of it."""
    part = copy.memory.kept[node]
    before, source = copy.remembered[part], node.args[0]
    if part.kind == "running_sum":
        own = copy.call(torch.Tensor.to, copy.step[source], value_of(node).dtype)  # type: ignore[index]
        copy.left[part] = copy.traced(node, copy.call(torch.add, before, own))
        return copy.left[part]
    window = copy.call(torch.cat, [before, copy.step[part.node]], part.dim)
    copy.left.setdefault(part, copy.call(torch.narrow, window, part.dim, 1, part.count))
    if name_of(node) == "conv1d":
        given: Any = copy.arguments(node, node.args[1:], False)
        weight, bias, stride, _, *rest = given
        return copy.traced(node, copy.call(node.target, window, weight, bias, stride, [0], *rest))
    if name_of(node) in ("cat", "concat"):
        first: Any = copy.value(node, source[0])  # type: ignore[arg-type, index]
        return copy.traced(node, copy.call(begin_with, window, first, copy.slot, part.dim))
    return copy.call(torch.narrow, window, part.dim, 0, 1) if node in copy.memory.cut else window


def begin_with(window: Tensor, first: Tensor, position_B: Tensor, dim: int) -> Tensor:
    """The token before, out of a window of two; ``first`` where there is none.

    >>> begin_with(torch.tensor([[7, 8], [7, 8]]), torch.tensor([[0]]), torch.tensor([0, 3]), 1).tolist()
    [[0], [7]]
    """
    is_first = position_B.repeat_interleave(window.shape[0] // position_B.shape[0]) == 0
    return torch.where(is_first.view(-1, *[1] * (window.dim() - 1)), first, window.narrow(dim, 0, 1))
