"""A model can be decoded only if later tokens change nothing before them. Tried on the example inputs."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from modpass.decode.outer import Outer
from modpass.errors import BlockError, InputError
from modpass.record import evaluated

__all__ = ["check_causal", "check_length"]

TOLERANCE = 1e-4


def check_causal(outer: Outer) -> None:
    """Compare the outputs for a beginning of the tokens with the same places of the outputs for all of them.

    Tried at several lengths, on other tokens than the examples' own where these are ids.

    Raises:
        BlockError: they differ, so that a step cannot rely on what earlier steps computed.
    """
    given = {s.name: s.example for s in outer.model.inputs}
    if any(v is None for v in given.values()):
        raise BlockError("the model brings no example inputs to try its attention on; trace it with some")
    dims = {s.name: s.dims.index("sequence") for s in outer.model.inputs if "sequence" in s.dims}
    for node in outer.tokens:
        given[str(node.target)] = _others(given[str(node.target)])
    length = min(given[n].shape[d] for n, d in dims.items())  # type: ignore[union-attr]
    whole = _run(outer, given)
    for end in sorted({e for e in (1, 2, 3, length // 2, length - 1) if _allowed(outer, e) and 0 < e < length}):
        part = {n: v.narrow(dims[n], 0, end) if n in dims else v for n, v in given.items()}  # type: ignore[union-attr]
        try:
            seen = _run(outer, part)
        except RuntimeError as e:
            raise BlockError(f"it does not run on a prompt of {end} tokens, though its trace allows that: {e}") from e
        difference = (seen - whole.narrow(1, 0, seen.shape[1])).abs().max()
        if not float(difference) <= TOLERANCE * float(whole.abs().max()):
            raise BlockError(
                "its attention is not causal: later tokens change what earlier ones compute "
                f"(by {float(difference):.2g} on the example inputs, at token {end}), so that no step can be cached"
            )


def check_length(outer: Outer, max_sequence: int) -> None:
    """Refuse caches longer than what the model was traced for, such as its table of positions.

    Raises:
        InputError: they are.
    """
    if not _allowed(outer, max_sequence):
        raise InputError(f"max_sequence is {max_sequence}, a length for which the model's trace does not hold")


def _allowed(outer: Outer, length: int) -> bool:
    """Whether the trace holds for this length."""
    checks = outer.model.info.call.checks.values()
    bounds = [b for c in checks for d, b in zip(c.dims, c.bounds, strict=True) if d == "sequence"]
    return all(low <= length and (high is None or length <= high) for low, high in bounds)


def _others(value: Any) -> Any:
    """Other ids of the same range, so that tokens differ; noise for floats."""
    draws = torch.Generator().manual_seed(0)
    if value.is_floating_point():
        return value + torch.randn(value.shape, generator=draws).to(value) * value.std().clamp(min=0.1)
    low, high = int(value.min()), int(value.max())
    low = max(0, high - 1) if low == high else low
    return torch.randint(low, max(high, 1) + 1, value.shape, generator=draws).to(value)


def _run(outer: Outer, inputs: dict[str, Any]) -> Tensor:
    """The first output that has a sequence, as ``[B, S, ...]``; routed blocks count on all of it."""
    with ExitStack() as stack, torch.no_grad(), evaluated(outer.model):
        for block in outer.model.routed_blocks.values():
            stack.callback(setattr, block, "max_sequence", block.max_sequence)
            block.max_sequence = 2**20  # the capacity of a beginning is that of the whole
        output = outer.model(**inputs)
    found = next(v for v in pytree.tree_leaves(output) if isinstance(v, Tensor) and v.is_floating_point())
    return found if found.dim() > 1 else found.unsqueeze(1)
