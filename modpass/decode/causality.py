"""A model can be decoded only if later tokens change nothing before them. Tried on the example inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from modpass.decode.outer import Outer
from modpass.errors import BlockError

__all__ = ["check_causal"]

TOLERANCE = 1e-3


def check_causal(outer: Outer) -> None:
    """Compare the first half of the outputs before and after the second half of the tokens is turned round.

    Raises:
        BlockError: it differs.
    """
    given = {s.name: s.example for s in outer.model.inputs}
    dims = {s.name: s.dims.index("sequence") for s in outer.model.inputs if "sequence" in s.dims}
    names = [str(n.target) for n in outer.tokens]
    if any(v is None for v in given.values()):
        return
    length = min(given[n].shape[dims[n]] for n in names)  # type: ignore[union-attr]
    changed = {n: _turned(v, dims[n], length // 2) if n in names else v for n, v in given.items()}
    before, after = _run(outer, given), _run(outer, changed)
    difference = (before - after).narrow(1, 0, length // 2).abs().max()
    if float(difference) > TOLERANCE * float(before.abs().max()):
        raise BlockError(
            "its attention is not causal: later tokens change what earlier ones compute "
            f"(by {float(difference):.2g} on the example inputs), so that no step can be cached"
        )


def _turned(value: Any, dim: int, start: int) -> Tensor:
    first, last = value.narrow(dim, 0, start), value.narrow(dim, start, value.shape[dim] - start)
    return torch.cat([first, last.flip(dim)], dim)


def _run(outer: Outer, inputs: dict[str, Any]) -> Tensor:
    """The first output that has a sequence, as ``[B, S, ...]``."""
    model, training = outer.model, outer.model.training
    with torch.no_grad():
        output = model.eval()(**inputs)
    model.train(training)
    found = next(v for v in pytree.tree_leaves(output) if isinstance(v, Tensor) and v.is_floating_point())
    return found if found.dim() > 1 else found.unsqueeze(1)
