"""A model -> a folder of ONNX files of several fixed shapes that share one file of weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
from torch import nn

from modpass.errors import InputError
from modpass.exporters.bucket_manifest import FILE, Bucket, BucketManifest, Mask, Port, label
from modpass.exporters.conversion import Precision, as_onnx
from modpass.exporters.facts import facts, weights_dtype
from modpass.exporters.manifest import DataFile, Manifest, manifest_path
from modpass.exporters.own_folder import own_folder
from modpass.exporters.padding import Trial, find_mask, try_padding
from modpass.exporters.shapes import FixedShape, input_shapes
from modpass.exporters.shared_weights import save_shared
from modpass.files import sha256, whole_directory
from modpass.model import RoutedModel
from modpass.transform import trace

__all__ = ["BUCKETS", "WEIGHTS", "export_buckets", "parse_buckets"]

BUCKETS: tuple[tuple[int, int], ...] = ((1, 256), (1, 1024), (8, 1024))
WEIGHTS = "weights.bin"

Sizes = tuple[int, int | None]


def export_buckets(
    model: RoutedModel | nn.Module,
    folder: str | os.PathLike[str],
    buckets: Sequence[Sizes] = BUCKETS,
    *,
    dims: Mapping[str, int] | None = None,
    opset: int = 18,
    dtype: Precision | None = None,
    padding_mask: str | None = None,
) -> BucketManifest:
    """Write ``<batch>x<sequence>.onnx`` for each bucket, one ``weights.bin`` for all, and ``buckets.json``.

    Args:
        model: a routed model; a dense module is traced first.
        folder: written whole or not at all; an older folder of buckets is replaced.
        buckets: (batch rows, tokens) of each; tokens None where they follow from other sizes, as an image's do.
        dims: sizes of further free dims by name, the same in every bucket.
        opset, dtype: as in ``export_onnx``.
        padding_mask: the input whose zeros are padding (``"~name"`` where its ones are); by default the one that the
            model was routed with. How a request may be padded is tried on the model (``modpass.exporters.padding``).

    Raises:
        InputError: a bucket that does not fit the model, or a folder with other files in it.
        ExportError: torch cannot lower the model; nothing is written.

    >>> import tempfile
    >>> from modpass.decode.example import tiny_decoder
    >>> manifest = export_buckets(tiny_decoder(), tempfile.mkdtemp() + "/b", [(1, 4), (2, 8)])
    >>> [b.file for b in manifest.buckets], manifest.padding.sequence
    (['1x4.onnx', '2x8.onnx'], 'right')
    """
    own_folder(folder, FILE)
    shapes = _shapes(buckets, dims or {})
    routed = model if isinstance(model, RoutedModel) else trace(model)
    for shape in shapes:
        input_shapes(routed, shape)
    mask = find_mask(routed, padding_mask)
    lowered = {f"{label(s.batch, s.sequence)}.onnx": as_onnx(routed, s, opset, dtype) for s in shapes}
    trial = try_padding(routed, shapes, mask)
    with whole_directory(folder) as temporary:
        graphs = {name: graph for name, (graph, _) in lowered.items()}
        _save(graphs, temporary)
        files = {n: sha256(temporary / n) for n in (*graphs, WEIGHTS)}
        for (name, (graph, indices)), shape in zip(lowered.items(), shapes, strict=True):
            own = facts(routed, graph, shape, indices)
            manifest = Manifest("onnx", name, files[name], data=DataFile(WEIGHTS, files[WEIGHTS]), **own)
            manifest.save(manifest_path(temporary / name))
        found = _describe(routed, graphs, shapes, mask, trial, files)
        found.save(temporary)
    return found


def parse_buckets(text: str) -> list[tuple[int, int | None]]:
    """Buckets from a text.

    Raises:
        InputError: it is not of this form.

    >>> parse_buckets("1x256,8")
    [(1, 256), (8, None)]
    """
    found: list[tuple[int, int | None]] = []
    for part in text.split(","):
        sizes = part.strip().split("x")
        if not 1 <= len(sizes) <= 2 or not all(s.isascii() and s.isdecimal() and int(s) for s in sizes):
            raise InputError(
                f"'{part}' is no bucket; give BATCHxSEQUENCE (or BATCH, where the inputs' sizes fix the sequence), "
                f"such as 1x256,8x1024"
            )
        found.append((int(sizes[0]), int(sizes[1]) if len(sizes) == 2 else None))
    return found


def _shapes(buckets: Sequence[Sizes], dims: Mapping[str, int]) -> list[FixedShape]:
    given: Any = buckets
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise InputError(f"buckets is {buckets!r}; give pairs of (batch, sequence), such as [(1, 256), (8, 1024)]")
    shapes = []
    for bucket in given:
        if not isinstance(bucket, Sequence) or isinstance(bucket, str) or len(bucket) != 2:
            raise InputError(f"the bucket {bucket!r} is no pair of (batch, sequence)")
        shapes.append(FixedShape(bucket[0], bucket[1], dims))
    names = [label(s.batch, s.sequence) for s in shapes]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise InputError(f"the bucket {twice} is given more than once")
    return sorted(shapes, key=lambda s: Bucket(s.batch, s.sequence, "").size)


def _save(graphs: Mapping[str, ir.Model], folder: Path) -> None:
    save_shared(graphs, folder, WEIGHTS)
    (folder / WEIGHTS).touch()  # a model without large weights has none to share


def _describe(
    model: RoutedModel,
    graphs: Mapping[str, ir.Model],
    shapes: Sequence[FixedShape],
    mask: Mask | None,
    trial: Trial,
    files: Mapping[str, str],
) -> BucketManifest:
    first: Any = next(iter(graphs.values()))
    sizes = shapes[0].dims
    named = {s.name: tuple(sizes.get(d, d) if isinstance(d, str) else d for d in s.dims) for s in model.inputs}
    dims = (*(named[v.name] for v in first.graph.inputs), *trial.outputs)
    ports = [
        Port(str(v.name), d, _dtype(v.dtype))
        for v, d in zip((*first.graph.inputs, *first.graph.outputs), dims, strict=True)
    ]
    cut = len(first.graph.inputs)
    buckets = tuple(Bucket(s.batch, s.sequence, n) for s, n in zip(shapes, graphs, strict=True))
    return BucketManifest(
        weights_dtype(first), tuple(ports[:cut]), tuple(ports[cut:]), mask, trial.padding, buckets, files
    )


def _dtype(code: ir.DataType) -> str:
    return "float32" if code == ir.DataType.FLOAT else str(code.name).lower()
