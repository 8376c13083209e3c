"""A model with fixed shapes -> an ONNX file in which every dim of every value is an integer."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import modpass
from modpass.bisect import TOPK_LIMIT, beyond_topk
from modpass.errors import ExportError, InputError, VerificationError
from modpass.exporters.draws import drawn, draws
from modpass.exporters.manifest import (
    DataFile,
    Manifest,
    RoutedSpec,
    TensorSpec,
    manifest_path,
    versions,
)
from modpass.exporters.measured import measured_islands
from modpass.exporters.origins import MODULE, SOURCE, note_origins
from modpass.exporters.precision import to_precision
from modpass.exporters.quantise import Weights, quantise
from modpass.exporters.shapes import FixedShape, example_tensors
from modpass.exporters.verify import verify
from modpass.files import sha256, whole_file
from modpass.model import RoutedModel
from modpass.routing import RoutedBlock, recorded_choices

__all__ = ["as_onnx", "export_onnx", "facts", "lower", "open_dims", "prove_static", "specs", "strip", "weights_dtype"]

Islands = Literal["rule", "measured"]
Precision = Literal["float32", "float16", "bfloat16"]
_LOG = logging.getLogger(__name__)
EXTERNAL_ABOVE = 2_000_000_000
_OPSETS = range(18, 21)


class _Flat(nn.Module):
    """The model as a function of tensors alone: user outputs first, then each routed block's choices."""

    def __init__(self, model: RoutedModel, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        with recorded_choices() as choices:
            output = self.model(**dict(zip(self.names, tensors, strict=True)))
        leaves = [v for v in pytree.tree_leaves(output) if isinstance(v, Tensor)]
        return (*leaves, *(choices[n] for n in self.model.routed_blocks))


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


def as_onnx(
    model: RoutedModel, shape: FixedShape, opset: int = 18, dtype: Precision | None = None
) -> tuple[ir.Model, dict[str, str]]:
    """The ONNX graph of ``model``, and for each routed block the name of the value that holds its choices.

    Raises:
        InputError, ExportError: as ``export_onnx``.
    """
    if not isinstance(shape, FixedShape):
        raise InputError(f"shape is a {type(shape).__name__}; give a FixedShape(batch, sequence)")
    if opset not in _OPSETS:
        raise InputError(f"opset is {opset}; allowed are {_OPSETS.start} to {_OPSETS.stop - 1}")
    if dtype not in (None, "float32", "float16", "bfloat16"):
        raise InputError(f"dtype is {dtype!r}; allowed are 'float32', 'float16' and 'bfloat16'")
    stochastic = [n for n, b in model.routed_blocks.items() if b.selection == "stochastic"]
    if stochastic:
        raise ExportError(
            f"block '{stochastic[0]}' selects by noise (selection='stochastic'), which no fixed graph "
            "repeats; transform with selection='expert_choice' to export"
        )
    tensors = example_tensors(model, shape)
    graph = _lower(model, tensors, opset)
    _name_values(graph, model, list(tensors))
    indices = _take_choices(graph, list(model.routed_blocks))
    note_origins(graph, model)
    strip(graph)
    prove_static(graph)
    if dtype in ("float16", "bfloat16"):
        graph = to_precision(graph, dtype, choices=list(indices.values()))
    return graph, indices


def _lower(model: RoutedModel, tensors: Mapping[str, Tensor], opset: int) -> ir.Model:
    training = model.training
    try:
        return lower(_Flat(model.eval(), list(tensors)).eval(), tensors, opset)
    finally:
        model.train(training)


def lower(module: nn.Module, tensors: Mapping[str, Tensor], opset: int, outputs: Sequence[str] = ()) -> ir.Model:
    """The ONNX graph of a module that takes these tensors in order; ``outputs``: names for what it returns.

    Raises:
        ExportError: torch cannot lower it.
    """
    names: dict[str, Any] = {"input_names": list(tensors), "output_names": list(outputs)} if outputs else {}
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(
                module,
                tuple(tensors.values()),
                dynamo=True,
                opset_version=opset,
                external_data=False,
                verbose=False,
                **names,
            )
    except Exception as e:
        sizes = ", ".join(f"{n} {list(t.shape)}" for n, t in tensors.items())
        raise ExportError(f"torch cannot lower this model at {sizes}, opset {opset}: {_cause(e)}") from e
    assert program is not None
    return program.model


def _cause(error: BaseException) -> str:
    """The first line of the error that all others followed from."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return next((line for line in plain.splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's notes on its own workings off the user's terminal."""
    logs = [
        logging.getLogger(name)
        for name in ("torch", "torch.onnx", "torch._subclasses.fake_tensor", "onnxscript", "onnx_ir")
    ]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _name_values(graph: ir.Model, model: RoutedModel, inputs: list[str]) -> None:
    """Inputs and outputs carry the names that the model's user knows."""
    choices = [f"{n}.chosen" for n in model.routed_blocks]
    outputs = list(graph.graph.outputs)
    names = [*model.output_names[: len(outputs) - len(choices)], *choices]
    _rename(graph, list(zip(graph.graph.inputs, inputs, strict=True)))
    for i, (value, name) in enumerate(zip(outputs, names, strict=True)):
        if value in graph.graph.inputs or value in outputs[:i] or value.is_initializer():
            value = _identity(graph, value)
            graph.graph.outputs[i] = value
        _rename(graph, [(value, name)])


def _rename(graph: ir.Model, pairs: list[tuple[ir.Value, str]]) -> None:
    taken = {v.name: v for node in graph.graph for v in node.outputs} | dict(graph.graph.initializers)
    for value, name in pairs:
        other = taken.get(name)
        if other is not None and other is not value:
            other.name = f"{name}.inner"
        value.name = name


def _identity(graph: ir.Model, value: ir.Value) -> ir.Value:
    node = ir.node("Identity", [value])
    node.outputs[0].shape, node.outputs[0].type = value.shape, value.type
    graph.graph.append(node)
    return node.outputs[0]


def _take_choices(graph: ir.Model, blocks: list[str]) -> dict[str, str]:
    """The choices are outputs only while verifying; the file names the values, and does not return them."""
    chosen = [graph.graph.outputs.pop() for _ in blocks][::-1]
    return {b: str(v.name) for b, v in zip(blocks, chosen, strict=True)}


def strip(graph: ir.Model) -> None:
    """No stack trace, no source path: module path, file name and line of each node stay."""
    kept = {"namespace", "pkg.torch.onnx.name_scopes", MODULE, SOURCE}
    for node in graph.graph.all_nodes():
        for key in [k for k in node.metadata_props if k not in kept]:
            del node.metadata_props[key]
        node.doc_string = None
    for value in _values(graph):
        value.metadata_props.clear()
    graph.metadata_props.clear()
    graph.graph.metadata_props.clear()
    graph.doc_string = graph.graph.doc_string = None
    graph.producer_name, graph.producer_version = "modpass", modpass.__version__
    with _quiet():
        passes.DeduplicateInitializersPass()(graph)


def _values(graph: ir.Model) -> Iterator[ir.Value]:
    yield from graph.graph.inputs
    yield from graph.graph.initializers.values()
    for node in graph.graph.all_nodes():
        yield from node.outputs


def open_dims(graph: ir.Model) -> list[str]:
    """Every value with a dim that is not an integer, as ``"name[shape]"``; empty when the graph is static.

    >>> open_dims(ir.Model(ir.Graph([], [], nodes=[]), ir_version=10))
    []
    """
    return [
        f"{v.name}{list(v.shape) if v.shape is not None else '[unknown rank]'}"
        for v in _values(graph)
        if v.name and (v.shape is None or not all(isinstance(d, int) for d in v.shape))
    ]


def prove_static(graph: ir.Model) -> None:
    """Raise ExportError where a dim is not an integer."""
    if open_dims(graph):
        passes.ShapeInferencePass()(graph)
    if found := open_dims(graph):
        raise ExportError(
            f"{len(found)} values have a dim that is not an integer, the first is {found[0]}; a fixed "
            "graph needs every size to follow from the input shapes"
        )


def facts(model: RoutedModel, graph: ir.Model, shape: FixedShape, indices: dict[str, str]) -> dict[str, Any]:
    """What a manifest says of a graph of ``as_onnx``, but for the file."""
    chosen = {str(v.name): v for v in _values(graph) if v.name in set(indices.values())}
    blocks = {}
    for name, block in model.routed_blocks.items():
        k = int(chosen[indices[name]].shape[1])  # type: ignore[index,arg-type]
        blocks[name] = RoutedSpec(
            block.capacity,
            _sequence(block, k, shape),
            k,
            block.gate,
            block.selection,
            indices[name],
            _selector(block, k),
        )
    return {
        "opset": graph.opset_imports[""],
        "dtype": weights_dtype(graph),
        "inputs": specs(graph.graph.inputs),
        "outputs": specs(graph.graph.outputs),
        "routed_blocks": blocks,
        "settings": model.settings,
        "shape": {"batch": shape.batch, "sequence": shape.sequence, "dims": dict(shape.dims)},
        "versions": versions(),
    }


def _selector(block: RoutedBlock, k: int) -> str | None:
    """How the graph finds the k tokens; causal selection has nothing to find, each token decides for itself."""
    if block.selection != "expert_choice":
        return None
    if not beyond_topk(k):
        return "topk"
    _LOG.info("block '%s' selects k=%d tokens, TensorRT's TopK at most %d: exported as a bisection, which chooses "
              "the same", block.name, k, TOPK_LIMIT)  # fmt: skip
    return "bisection"


def _sequence(block: Any, k: int, shape: FixedShape) -> int:
    """The sequence a block runs over: the given one, or the one with this k where it follows from other sizes."""
    if shape.sequence is not None and block.slots(shape.sequence) == k:
        return shape.sequence
    return next((s for s in shape.dims.values() if block.slots(s) == k), round(k / block.capacity))


def specs(values: Any) -> tuple[TensorSpec, ...]:
    """Name, shape and dtype of each graph input or output."""
    return tuple(
        TensorSpec(
            str(v.name),
            tuple(int(d) for d in v.shape),
            v.dtype.name.lower().replace("float", "float32") if v.dtype == ir.DataType.FLOAT else v.dtype.name.lower(),
        )
        for v in values
    )


def weights_dtype(graph: ir.Model) -> str:
    """The dtype of the weights: of most bytes among the floating initializers."""
    sizes: dict[str, int] = {}
    for value in graph.graph.initializers.values():
        if value.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            name = "float32" if value.dtype == ir.DataType.FLOAT else value.dtype.name.lower()
            sizes[name] = sizes.get(name, 0) + (value.const_value.nbytes if value.const_value is not None else 0)
    return max(sizes, key=lambda n: sizes[n]) if sizes else "float32"


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
