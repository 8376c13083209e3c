"""Fixed shapes: every dim of every input becomes an integer, once, here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modpass.errors import InputError
from modpass.model import InputSpec, RoutedModel

__all__ = ["FixedShape", "example_tensors", "input_shapes"]


@dataclass(frozen=True)
class FixedShape:
    """The integers of an export: batch rows, sequence length in tokens, and other dims by name.

    A dim that a model leaves free and that is neither batch nor sequence is named ``"<input>.<dim>"``.

    Raises:
        InputError: a size is not a positive whole number.

    >>> FixedShape(1, 1024, {"decoder_input_ids.1": 64}).sizes()["sequence"]
    1024
    """

    batch: int = 1
    sequence: int | None = None
    dims: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, size in self.sizes().items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InputError(f"{name} is {size!r}; a fixed shape needs a whole number of 1 or more")

    def sizes(self) -> dict[str, int]:
        """Every given size by its name."""
        given = {"batch": self.batch, **self.dims}
        return given if self.sequence is None else {**given, "sequence": self.sequence}


def input_shapes(model: RoutedModel, shape: FixedShape) -> dict[str, tuple[int, ...]]:
    """The integer shape of each input.

    Raises:
        InputError: a free dim has no size, or a size names no dim.
    """
    sizes, free = shape.sizes(), dict.fromkeys(d for s in model.inputs for d in s.dims if isinstance(d, str))
    unknown = [n for n in sizes if n not in free and n not in ("batch", "sequence")]
    if unknown:
        raise InputError(f"the model has no dim '{unknown[0]}'; it has: {', '.join(free) or 'none'}")
    missing = [n for n in free if n not in sizes]
    if missing:
        given = "sequence=" if missing == ["sequence"] else "dims="
        raise InputError(f"no size was given for {', '.join(map(repr, missing))}; give {given} a number")
    if shape.sequence is not None and "sequence" not in free:
        raise InputError(
            f"sequence is {shape.sequence}, but this model's sequence follows from its input sizes: "
            f"{', '.join(f'{s.name}{list(s.dims)}' for s in model.inputs)}; leave it out"
        )
    return {s.name: tuple(sizes[d] if isinstance(d, str) else d for d in s.dims) for s in model.inputs}


def example_tensors(model: RoutedModel, shape: FixedShape, seed: int = 0) -> dict[str, Tensor]:
    """Inputs of a fixed shape, drawn like the example inputs: ids within their range, masks of ones, noise."""
    generator = torch.Generator().manual_seed(seed)
    shapes = input_shapes(model, shape)
    return {s.name: _draw(s, shapes[s.name], generator) for s in model.inputs}


def _draw(spec: InputSpec, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if spec.dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(spec.dtype)
    example = spec.example
    if spec.dtype == torch.bool or example is None:
        fill = bool(example is not None and example.any()) if spec.dtype == torch.bool else 1
        return torch.full(shape, fill, dtype=spec.dtype)
    low, high = int(example.min()), int(example.max())
    return torch.randint(low, high + 1, shape, generator=generator).to(spec.dtype)
