"""An ONNX graph as its user reads it: known names, no foreign metadata, every dim of every value an integer."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir
from onnx_ir.passes import common as passes

import modpass
from modpass.errors import ExportError
from modpass.exporters.lowering import quiet
from modpass.exporters.origins import MODULE, SOURCE
from modpass.model import RoutedModel

__all__ = ["name_values", "open_dims", "prove_static", "strip", "take_choices", "values"]


def name_values(graph: ir.Model, model: RoutedModel, inputs: list[str]) -> None:
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


def take_choices(graph: ir.Model, blocks: list[str]) -> dict[str, str]:
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
    for value in values(graph):
        value.metadata_props.clear()
    graph.metadata_props.clear()
    graph.graph.metadata_props.clear()
    graph.doc_string = graph.graph.doc_string = None
    graph.producer_name, graph.producer_version = "modpass", modpass.__version__
    with quiet():
        passes.DeduplicateInitializersPass()(graph)


def values(graph: ir.Model) -> Iterator[ir.Value]:
    """Every value: inputs, initializers, and what nodes make, those of subgraphs too."""
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
        for v in values(graph)
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
