"""A model with fixed shapes -> an ONNX file and its manifest, written whole or not at all."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import onnx_ir as ir
from torch import nn

import modpass
from modpass.errors import InputError, VerificationError
from modpass.exporters.conversion import Precision, as_onnx
from modpass.exporters.draws import drawn, draws
from modpass.exporters.facts import facts
from modpass.exporters.manifest import DataFile, Manifest, manifest_path
from modpass.exporters.measured import measured_islands
from modpass.exporters.precision import to_precision
from modpass.exporters.quantise import Weights, quantise
from modpass.exporters.shapes import FixedShape
from modpass.exporters.verify import verify
from modpass.files import sha256, whole_file
from modpass.model import RoutedModel

__all__ = ["EXTERNAL_ABOVE", "export_onnx"]

Islands = Literal["rule", "measured"]
_LOG = logging.getLogger(__name__)
EXTERNAL_ABOVE = 2_000_000_000


def export_onnx(
    model: RoutedModel | nn.Module,
    path: str | os.PathLike[str],
    shape: FixedShape,
    opset: int = 18,
    dtype: Precision | None = None,
    weights: Weights | None = None,
    max_error: float | None = None,
    islands: Islands = "rule",
) -> Manifest:
    """Write ``model`` as ONNX with fixed shapes, and its manifest beside it (``<path>.json``).

    Args:
        model: a routed model; a dense module is traced first, through the very same path.
        path: the file; weights above 2 GB go to ``<path>.data`` beside it.
        shape: batch rows, sequence length in tokens, and other dims by name.
        opset: 18 to 20; attention is decomposed, which every TensorRT takes (the one-node Attention is not).
        dtype: convert a float32 graph to "float16" or "bfloat16"; routers, TopK and norm statistics stay float32.
        weights: "int8", "int4" or "fp8" for those of matrix products, which makes it opset 21.
        max_error: the largest relative difference of an output to PyTorch that is accepted; the file is run first.
        islands: "measured" runs the model as half precision rounds, and keeps in float32 only the groups that it needs.

    Raises:
        InputError: a shape, opset, dtype, weights or max_error that does not fit.
        ExportError: torch cannot lower the model, or a dim is not an integer; nothing is written.
        VerificationError: an output is off by more than ``max_error``; nothing is written.

    >>> import tempfile
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> model = modpass.trace(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (torch.randn(2, 5, 8),))
    >>> export_onnx(model, tempfile.mkdtemp() + "/m.onnx", FixedShape(1, 16)).inputs[0].shape
    (1, 16, 8)
    """
    routed = model if isinstance(model, RoutedModel) else modpass.trace(model)
    if max_error is not None and not (isinstance(max_error, int | float) and max_error > 0 and max_error is not True):
        raise InputError(f"max_error is {max_error!r}; it must be a number above 0, such as 0.05")
    if islands not in get_args(Islands):
        raise InputError(f"islands is {islands!r}; allowed are 'rule' and 'measured'")
    graph, indices, groups = _measured(routed, shape, opset, dtype) if islands == "measured" else (
        *as_onnx(routed, shape, opset, dtype), ()
    )  # fmt: skip
    if weights is not None:
        graph = quantise(graph, weights)
    found = {**facts(routed, graph, shape, indices), "weights": weights, "max_error": max_error, "islands": groups}
    if max_error is not None:
        return _write_accepted(routed, graph, Path(path), found)
    manifest = _write(graph, Path(path), found)
    manifest.save(manifest_path(path))
    return manifest


def _measured(
    model: RoutedModel, shape: FixedShape, opset: int, dtype: Precision | None
) -> tuple[ir.Model, dict[str, str], tuple[str, ...]]:
    """As ``as_onnx``, with the islands that this model needs, and their groups: "router" and those of the rule."""
    if dtype != "float16":
        raise InputError(f"islands can be measured for dtype 'float16', not for {dtype!r}; leave them to the rule")
    graph, indices = as_onnx(model, shape, opset)
    choices = list(indices.values())
    found = measured_islands(graph, dtype, drawn(draws(model, shape), 0), choices)
    _LOG.info("%s", found)
    return to_precision(graph, dtype, choices=choices, groups=found.needed), indices, ("router", *found.needed)


def _write_accepted(model: RoutedModel, graph: ir.Model, target: Path, facts: dict[str, Any]) -> Manifest:
    """Write into a folder beside the target, run the file there, and move what is within its own bound."""
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        trial = Path(folder, target.name)
        _write(graph, trial, facts).save(manifest_path(trial))
        try:
            verify(model, trial).check()
        except VerificationError as e:
            raise VerificationError(f"{e}; nothing is written to '{target}'") from e
        last = manifest_path(trial)
        for file in (*(f for f in trial.parent.iterdir() if f != last), last):
            os.replace(file, target.parent / file.name)
    return Manifest.load(manifest_path(target))


def _write(graph: ir.Model, target: Path, facts: dict[str, Any]) -> Manifest:
    """Write the model, with its weights beside it where one file would be too large."""
    weights = sum(v.const_value.nbytes for v in graph.graph.initializers.values() if v.const_value is not None)
    if weights <= EXTERNAL_ABOVE:
        with whole_file(target) as temporary:
            ir.save(graph, temporary)
            digest = sha256(temporary)
        return Manifest("onnx", target.name, digest, **facts)
    name = f"{target.name}.data"
    with whole_file(target.parent / name) as data, whole_file(target) as temporary:
        ir.save(graph, data.parent / target.name, external_data=name)
        os.replace(data.parent / target.name, temporary)
        digest, data_digest = sha256(temporary), sha256(data)
    return Manifest("onnx", target.name, digest, data=DataFile(name, data_digest), **facts)
