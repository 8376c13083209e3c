"""Inputs of a traced model at one fixed shape, made from the example it was traced with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from modpass import InputSpec
from modpass.errors import InputError
from modpass.exporters import FixedShape

__all__ = ["inputs_at", "shape_of"]


def inputs_at(specs: Sequence[InputSpec], shape: FixedShape) -> dict[str, Tensor]:
    """One tensor per input: its example's values repeated or cut to ``shape``, so that they stay valid.

    A dim that ``shape`` does not name has the batch's size if it comes first, else that of the example.

    Args:
        specs: ``RoutedModel.inputs``.
        shape: sizes of the named dims.

    Raises:
        InputError: ``shape`` names a dim that no input has, or gives no sequence where one is needed.

    >>> import torch
    >>> ids = InputSpec("ids", ("batch", "sequence"), torch.int64, torch.tensor([[5, 6], [7, 8]]))
    >>> inputs_at([ids], FixedShape(batch=1, sequence=3))["ids"].tolist()
    [[5, 6, 5]]
    """
    sizes = _sizes(shape)
    named = {dim for spec in specs for dim in spec.dims if isinstance(dim, str)}
    if "sequence" in named and shape.sequence is None:
        raise InputError("the model takes sequences of any length; give a sequence")
    for dim in sizes.keys() - named - {"batch"}:
        hint = "; its inputs fix the sequence: give none" if dim == "sequence" else ""
        raise InputError(f"no input has a dim '{dim}'; there are: {', '.join(sorted(named)) or 'none'}{hint}")
    return {spec.name: _fitted(spec, sizes) for spec in specs}


def shape_of(specs: Sequence[InputSpec], inputs: Mapping[str, Tensor]) -> FixedShape:
    """The shape that ``inputs`` have, in the terms of ``specs``.

    Raises:
        InputError: two inputs differ in the same dim.

    >>> shape_of((), {}).batch
    1
    """
    sizes: dict[str, int] = {}
    for spec in specs:
        for dim, size in zip(spec.dims, inputs[spec.name].shape, strict=True):
            if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                raise InputError(f"input '{spec.name}' has {size} in dim '{dim}', another has {sizes[dim]}")
    batch, sequence = sizes.pop("batch", 1), sizes.pop("sequence", None)
    return FixedShape(batch=batch, sequence=sequence, dims=sizes)


def _sizes(shape: FixedShape) -> dict[str, int]:
    known = {"batch": shape.batch, "sequence": shape.sequence, **shape.dims}
    return {name: size for name, size in known.items() if size is not None}


def _fitted(spec: InputSpec, sizes: Mapping[str, int]) -> Tensor:
    if spec.example is None:
        raise InputError(f"input '{spec.name}' has no example to make values from; trace with example_inputs")
    values = spec.example
    for position, dim in enumerate(spec.dims):
        size = _size(spec, position, dim, sizes)
        repeats = [1] * values.dim()
        repeats[position] = -(-size // max(1, values.shape[position]))
        values = values.repeat(repeats).narrow(position, 0, size)
    return values.contiguous()


def _size(spec: InputSpec, position: int, dim: int | str, sizes: Mapping[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    own = sizes["batch"] if position == 0 or spec.example is None else spec.example.shape[position]
    return sizes.get(dim, own)
