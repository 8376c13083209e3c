"""May a request be padded to a larger shape? Tried on the model itself, with noise in the places of the padding.

Padding is sound if what comes out for the real tokens is what the model gives without the padding, each routed block
taking the k tokens that the padded length gives it (or all, where there are fewer). Shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from modpass.errors import InputError
from modpass.exporters.bucket_manifest import Dim, Mask, Padding
from modpass.exporters.shapes import FixedShape, example_tensors
from modpass.exporters.verify import BOUNDS
from modpass.model import RoutedModel
from modpass.record import evaluated

__all__ = ["Trial", "find_mask", "try_padding"]

LENGTH, ROWS = 48, 2  # the trial's own, at most

Tensors = dict[str, Tensor]


class Trial(NamedTuple):
    """What a trial found: the names of each output's dims, and how a request may be padded."""

    outputs: list[tuple[Dim, ...]]
    padding: Padding


def find_mask(model: RoutedModel, name: str | None = None) -> Mask | None:
    """The input that tells real tokens from padding: ``name`` (``"~name"`` where it is true at padding), or the one
    that the model was routed with.

    Raises:
        InputError: it was asked for by name, and there is none.

    >>> from modpass.decode.example import tiny_decoder
    >>> find_mask(tiny_decoder()) is None
    True
    """
    wanted = name or str(model.settings.get("padding_mask") or "attention_mask")
    plain = wanted.removeprefix("~")
    for spec in model.inputs:
        if spec.name == plain and set(spec.dims) == {"batch", "sequence"} and not spec.dtype.is_floating_point:
            return Mask(plain, int(not wanted.startswith("~")))
    if name is None:
        return None
    raise InputError(
        f"padding_mask is '{name}', which is no integer or bool input over batch and sequence; the inputs are "
        f"{', '.join(f'{s.name}{list(s.dims)}' for s in model.inputs)}"
    )


def try_padding(model: RoutedModel, shapes: Sequence[FixedShape], mask: Mask | None) -> Trial:
    """Run the model on short inputs with and without padding.

    >>> from modpass.decode.example import tiny_decoder
    >>> try_padding(tiny_decoder(), [FixedShape(1, 8)], None).padding.sequence
    'right'
    """
    longest = max(shapes, key=lambda s: s.sequence or 0)
    whole = None if longest.sequence is None else min(longest.sequence, LENGTH)
    probe = _Probe(model, longest.dims, mask)
    outputs = probe.dims(whole)
    if any(None in dims for dims in outputs):
        return Trial(outputs, Padding(None, False, "an output has a size that is neither its batch nor its sequence"))
    batch = probe.same((ROWS, whole), (ROWS + 1, whole), "right", outputs)
    side, why = (None, "") if whole is None else _side(probe, whole, outputs)
    if not batch:
        why = "; ".join(filter(None, [why, "rows change one another's results"]))
    return Trial(outputs, Padding(side, batch, why))


def _side(probe: _Probe, whole: int, outputs: list[tuple[Dim, ...]]) -> tuple[str | None, str]:
    """The side on which padding changes nothing, or why there is none."""
    blind = [n for n, keep in probe.keeps() if keep is None and probe.model.routed_blocks[n].selection != "causal"]
    if blind:
        return None, f"block '{blind[0]}' takes the best tokens of the sequence, and no mask says which are padding"
    lengths = [s for s in sorted({whole - 1, whole // 2, 1}, reverse=True) if probe.allowed(s) and s < whole]
    if not lengths:
        return None, f"the model takes no sequence shorter than {whole}, on which padding could be tried"
    for side in ("right", "left") if probe.mask else ("right",):
        if all(probe.same((ROWS, s), (ROWS, whole), side, outputs) for s in lengths):
            return side, ""
    seen = f"although '{probe.mask.name}' hides it" if probe.mask else "and it has no mask to hide it"
    return None, f"padding changes this model's results, {seen}"


class _Probe:
    """Runs a model in eval mode at chosen sizes."""

    def __init__(self, model: RoutedModel, dims: Mapping[str, int], mask: Mask | None) -> None:
        self.model, self.given, self.mask = model, dims, mask

    def allowed(self, length: int) -> bool:
        """Whether the trace holds for this length."""
        checks = self.model.info.call.checks.values()
        bounds = [b for c in checks for d, b in zip(c.dims, c.bounds, strict=True) if d == "sequence"]
        return length > 0 and all(low <= length and (high is None or length <= high) for low, high in bounds)

    def keeps(self) -> Iterator[tuple[str, object]]:
        """Each routed block, and what tells it which tokens are real."""
        blocks = self.model.routed_blocks
        for node in self.model.graph.nodes:
            if node.op == "call_module" and node.target in blocks:
                yield str(node.target), node.args[1]

    def dims(self, whole: int | None) -> list[tuple[Dim, ...]]:
        """What each dim of each output is, told by two further runs."""
        short = next((s for s in ((whole or 1) - 1, (whole or 1) // 2) if self.allowed(s)), whole)
        runs = [self.run(self.draw(b, s)) for b, s in ((ROWS, whole), (ROWS + 1, whole), (ROWS, short))]
        return [
            tuple(
                a if a == more == less
                else "batch" if (a, more, less) == (ROWS, ROWS + 1, ROWS)
                else "sequence" if (a, more, less) == (whole, whole, short)
                else None
                for a, more, less in zip(*(r.shape for r in outputs), strict=True)
            )
            for outputs in zip(*runs, strict=True)
        ]  # fmt: skip

    def same(
        self, small: tuple[int, int | None], large: tuple[int, int | None], side: str, outputs: list[tuple[Dim, ...]]
    ) -> bool:
        """Whether a request of the small sizes gets the same results in the large ones."""
        request, padded = self.draw(*small), self.draw(*large, seed=1)
        if self.mask is not None and small[1] != large[1]:
            padded[self.mask.name].fill_(1 - self.mask.real)
        for spec in self.model.inputs:
            _part(padded[spec.name], spec.dims, small, side).copy_(request[spec.name])
        with self._slots(large[1]):
            wanted = self.run(request)
        found = [_part(o, d, small, side) for o, d in zip(self.run(padded), outputs, strict=True)]
        return all(map(_close, wanted, found))

    def draw(self, batch: int, sequence: int | None, seed: int = 0) -> Tensors:
        """Inputs whose tokens are all real."""
        tensors = example_tensors(self.model, FixedShape(batch, sequence, self.given), seed)
        if self.mask is not None:
            tensors[self.mask.name].fill_(self.mask.real)
        return tensors

    def run(self, tensors: Tensors) -> list[Tensor]:
        """The outputs, as tensors in order."""
        with torch.no_grad(), evaluated(self.model):
            output = self.model(**tensors)
        return [v for v in pytree.tree_leaves(output) if isinstance(v, Tensor)]

    @contextmanager
    def _slots(self, whole: int | None) -> Iterator[None]:
        """Let blocks take as many tokens as they would at the padded length."""
        blocks = list(self.model.routed_blocks.values()) if whole is not None else []
        for block in blocks:
            block.slots = partial(min, block.slots(whole))  # type: ignore[method-assign, arg-type]
        try:
            yield
        finally:
            for block in blocks:
                del block.slots


def _part(tensor: Tensor, dims: Sequence[Dim], sizes: tuple[int, int | None], side: str) -> Tensor:
    """The view of the real rows and tokens."""
    for i, dim in enumerate(dims):
        if dim == "batch":
            tensor = tensor.narrow(i, 0, sizes[0])
        elif dim == "sequence" and sizes[1] is not None:
            start = tensor.shape[i] - sizes[1] if side == "left" else 0
            tensor = tensor.narrow(i, start, sizes[1])
    return tensor


def _close(wanted: Tensor, found: Tensor) -> bool:
    if not wanted.is_floating_point():
        return torch.equal(wanted, found)
    bound = BOUNDS.get(str(wanted.dtype).removeprefix("torch."), BOUNDS["float32"])[0]
    gap = (wanted.double() - found.double()).abs().max() if wanted.numel() else torch.zeros(())
    return bool(gap <= bound * wanted.double().abs().max().clamp(min=1e-30))
