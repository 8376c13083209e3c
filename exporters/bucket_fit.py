"""A request put into the smallest bucket that it fits: checked, padded, and what comes out cut back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modpass.errors import InputError
from modpass.exporters.bucket_manifest import Bucket, BucketManifest, Dim, Port

__all__ = ["Fit", "fit"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Fit:
    """A bucket, and the inputs of a request padded to it; batch, sequence: the sizes of the request itself."""

    manifest: BucketManifest
    bucket: Bucket
    inputs: dict[str, Array]
    batch: int
    sequence: int | None

    def cut(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of the bucket without the padding.

        Raises:
            InputError: an output is missing.
        """
        if missing := [p.name for p in self.manifest.outputs if p.name not in outputs]:
            raise InputError(f"the output '{missing[0]}' is missing; given are: {', '.join(outputs) or 'none'}")
        return {p.name: outputs[p.name][self._real(p.dims)] for p in self.manifest.outputs}

    def _real(self, dims: Sequence[Dim]) -> tuple[slice, ...]:
        return tuple(_real(d, self.batch, self.sequence, self.manifest.padding.sequence) for d in dims)


def fit(manifest: BucketManifest, inputs: Mapping[str, Any]) -> Fit:
    """Choose the bucket with the fewest tokens that holds a request, and pad the request to it.

    Padding repeats the last row and the token at the edge, and tells so in the mask; a request that brings no mask is
    taken to be real throughout.

    Raises:
        InputError: an input is missing, unknown or of a wrong shape or type, or no bucket holds the request.

    >>> from modpass.exporters.bucket_manifest import Padding
    >>> ids = Port("ids", ("batch", "sequence"), "int64")
    >>> m = BucketManifest("float32", (ids,), (ids,), None, Padding("right", True), (Bucket(2, 4, "2x4.onnx"),), {})
    >>> fit(m, {"ids": [[5, 6]]}).inputs["ids"].tolist()
    [[5, 6, 6, 6], [5, 6, 6, 6]]
    """
    given = _arrays(manifest, inputs)
    sizes = _sizes(manifest.inputs, given)
    if manifest.mask is not None and manifest.mask.name not in given:
        given[manifest.mask.name] = _mask(manifest, sizes)
    batch, sequence = sizes.get("batch", 1), sizes.get("sequence")
    bucket = _choose(manifest, batch, sequence)
    whole = {"batch": bucket.batch, "sequence": bucket.sequence or 0}
    padded = {p.name: _pad(manifest, p, given[p.name], whole) for p in manifest.inputs}
    return Fit(manifest, bucket, padded, batch, sequence)


def _arrays(manifest: BucketManifest, inputs: Mapping[str, Any]) -> dict[str, Array]:
    """Every input as an array of its dtype and rank."""
    if not isinstance(inputs, Mapping):
        raise InputError(f"a request is a {type(inputs).__name__}; give the inputs by name")
    names = [p.name for p in manifest.inputs]
    if unknown := [n for n in inputs if n not in names]:
        raise InputError(f"there is no input '{unknown[0]}'; the inputs are: {', '.join(names)}")
    optional = manifest.mask.name if manifest.mask is not None else None
    if missing := [n for n in names if inputs.get(n) is None and n != optional]:
        raise InputError(f"the input '{missing[0]}' is missing; the inputs are: {', '.join(names)}")
    return {p.name: _array(p, inputs[p.name]) for p in manifest.inputs if inputs.get(p.name) is not None}


def _array(port: Port, value: Any) -> Array:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as e:  # ragged lists, tensors that need a gradient or lie on a GPU
        raise InputError(f"the input '{port.name}' cannot be made an array: {e}") from e
    wanted = np.dtype(port.dtype)
    same = array.dtype.kind in ("biu" if wanted.kind in "biu" else "biuf")
    if array.ndim != len(port.dims) or not array.size or not same:
        dims = ", ".join("?" if d is None else str(d) for d in port.dims)
        raise InputError(
            f"the input '{port.name}' is {list(array.shape)} of {array.dtype}; it must be [{dims}] of {wanted}, "
            f"each size 1 or more"
        )
    with np.errstate(over="ignore"):
        return array.astype(wanted)


def _sizes(ports: Sequence[Port], given: Mapping[str, Array]) -> dict[str, int]:
    """The batch and the sequence of a request, on which its inputs must agree."""
    found: dict[str, tuple[int, str]] = {}
    for port in ports:
        for dim, size in zip(port.dims, given[port.name].shape if port.name in given else (), strict=False):
            if isinstance(dim, int) and size != dim:
                raise InputError(f"the input '{port.name}' is {list(given[port.name].shape)}; the files were "
                                 f"exported for {list(port.dims)}")  # fmt: skip
            if isinstance(dim, str):
                other = found.setdefault(dim, (size, port.name))
                if other[0] != size:
                    raise InputError(f"'{port.name}' has {dim} {size}, but '{other[1]}' has {other[0]}")
    return {dim: size for dim, (size, _) in found.items()}


def _mask(manifest: BucketManifest, sizes: Mapping[str, int]) -> Array:
    """All tokens are real."""
    assert manifest.mask is not None
    port = next(p for p in manifest.inputs if p.name == manifest.mask.name)
    return np.full([sizes[str(d)] for d in port.dims], manifest.mask.real, np.dtype(port.dtype))


def _choose(manifest: BucketManifest, batch: int, sequence: int | None) -> Bucket:
    fitting = [b for b in manifest.buckets if b.batch >= batch and (b.sequence or 0) >= (sequence or 0)]
    allowed = [b for b in fitting if not any(_refusals(manifest, b, batch, sequence))]
    if allowed:
        return min(allowed, key=lambda b: b.size)
    request = f"{batch} row{'s' * (batch > 1)}" + (f" of {sequence} tokens" if sequence is not None else "")
    sizes = ", ".join(b.label for b in manifest.buckets)
    if fitting:
        raise InputError(
            f"the request has {request}, and these files only take exact sizes ({sizes}): {manifest.padding.why}"
        )
    raise InputError(f"the request has {request}; the largest buckets hold less, there are {sizes}: "
                     f"split it, or export with a larger bucket")  # fmt: skip


def _refusals(manifest: BucketManifest, bucket: Bucket, batch: int, sequence: int | None) -> Iterator[bool]:
    yield bucket.batch != batch and not manifest.padding.batch
    yield bucket.sequence != sequence and manifest.padding.sequence is None


def _pad(manifest: BucketManifest, port: Port, array: Array, whole: Mapping[str, int]) -> Array:
    """Repeat the edge, which is a valid value for any input; tokens that are added are no real ones."""
    masked = manifest.mask is not None and port.name == manifest.mask.name
    for axis, dim in enumerate(port.dims):
        more = whole[dim] - array.shape[axis] if isinstance(dim, str) else 0
        if not more:
            continue
        widths = [(0, 0)] * array.ndim
        widths[axis] = (more, 0) if dim == "sequence" and manifest.padding.sequence == "left" else (0, more)
        if masked and dim == "sequence" and manifest.mask is not None:
            array = np.pad(array, widths, constant_values=1 - manifest.mask.real)
        else:
            array = np.pad(array, widths, mode="edge")
    return array


def _real(dim: Dim, batch: int, sequence: int | None, side: str | None) -> slice:
    if dim == "batch":
        return slice(0, batch)
    if dim != "sequence" or sequence is None:
        return slice(None)
    return slice(-sequence, None) if side == "left" else slice(0, sequence)
