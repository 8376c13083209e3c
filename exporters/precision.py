"""Turn a float32 ONNX graph into a strongly typed float16 or bfloat16 one.

Every float32 value gets one of two types: half precision, or float32 inside the islands of `islands.py`.
Casts are put where an island begins or ends, one for each value and type.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import (
    InlinePass,
    LiftConstantsToInitializersPass,
    RemoveUnusedNodesPass,
    ShapeInferencePass,
)

from modpass.errors import ExportError, InputError
from modpass.exporters.islands import RULE, find_islands, is_constant, is_float, paired, schema_of

__all__ = ["Half", "to_precision"]

Half = Literal["float16", "bfloat16"]
_FLOAT = ir.DataType.FLOAT
_HALF = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}

# operators that read any type, so that no cast is needed before them
_READS_ANY = {"Cast", "Shape", "Size"}
_BOUNDED = {"Cos", "Sigmoid", "Sin", "Softmax", "Tanh"}
# operators that say in an attribute which type they make
_TYPE_ATTRIBUTE = {
    "Bernoulli": "dtype", "BlackmanWindow": "output_datatype", "Cast": "to", "EyeLike": "dtype",
    "HammingWindow": "output_datatype", "HannWindow": "output_datatype", "RandomNormal": "dtype",
    "RandomNormalLike": "dtype", "RandomUniform": "dtype", "RandomUniformLike": "dtype",
}  # fmt: skip


def to_precision(
    model: ir.Model,
    dtype: Half,
    *,
    float32_modules: Collection[str] = ("router", "predictor"),
    choices: Collection[str] = (),
    groups: Collection[str] = RULE,
) -> ir.Model:
    """Copy ``model`` with its float32 inputs, outputs, weights and values in ``dtype``, except for islands.

    ``model`` is left unchanged. Weights are converted when they are read or saved, so the copy costs no
    memory. Constants beyond the range of ``dtype`` (masks of -3.4e38) become its finite minimum.

    Args:
        model: a float32 graph as `torch.onnx.export` writes it.
        dtype: ``"float16"`` or ``"bfloat16"``.
        float32_modules: nodes recorded inside a torch module of such a name stay float32.
        choices: names of values that say which tokens are chosen; how they follow from scores stays float32.
        groups: of ``islands.GROUPS``, those that stay float32 too.

    Raises:
        InputError: another dtype.
        ExportError: a value has no type, and ONNX cannot infer it.

    >>> head = '<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y)'
    >>> model = ir.from_onnx_text(head + '{a = Relu(x) y = Sqrt(a)}')
    >>> [n.op_type for n in to_precision(model, "float16").graph]
    ['Relu', 'Cast', 'Sqrt', 'Cast']
    """
    if dtype not in _HALF:
        raise InputError(f"dtype is '{dtype}', to_precision makes: {', '.join(_HALF)}")
    copy = model.clone()
    if copy.functions:
        InlinePass()(copy)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(copy)
    _complete_types(copy)
    _drop_float_casts(copy)
    _Conversion(copy, _HALF[dtype], find_islands(copy, _HALF[dtype], float32_modules, choices, groups)).run()
    RemoveUnusedNodesPass()(copy)
    return copy


def _complete_types(model: ir.Model) -> None:
    """Let ONNX infer the types that the file leaves out."""

    def untyped() -> list[ir.Node]:
        return [n for n in model.graph.all_nodes() if any(v.dtype is None and v.name for v in n.outputs)]

    if untyped():
        ShapeInferencePass()(model)
    for node in untyped():
        raise ExportError(
            f"{node.op_type} '{node.name}' makes a value of unknown type ({node.outputs[0].name}), "
            "which may or may not be float32; write its type into the model's value_info"
        )


def _drop_float_casts(model: ir.Model) -> None:
    """A Cast from float32 to float32 does nothing, and would fix a type that is about to change."""
    for node in list(model.graph.all_nodes()):
        if node.op_type == "Cast" and is_float(node.inputs[0]) and is_float(node.outputs[0]):
            source = node.inputs[0]
            if source is not None and not node.outputs[0].is_graph_output():
                node.outputs[0].replace_all_uses_with(source)


# Rewriting


@dataclass
class _Conversion:
    """The rewrite itself: retype, convert constants, insert casts."""

    model: ir.Model
    half: ir.DataType
    islands: set[ir.Node]
    casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = field(default_factory=dict)
    names: set[str | None] = field(default_factory=set)
    bounds: list[ir.Value] = field(default_factory=list)

    def run(self) -> None:
        nodes = list(self.model.graph.all_nodes())
        graphs = [self.model.graph, *self.model.graph.subgraphs()]
        self.names = {v.name for n in nodes for v in n.outputs} | {n.name for n in nodes}
        self.names |= {v.name for g in graphs for v in (*g.inputs, *g.initializers.values())}
        wanted = [w for n in nodes for w in self._wanted(n)]
        outputs = [(g, i) for g in graphs for i, v in enumerate(g.outputs) if is_float(v)]
        self._retype(nodes, graphs)
        self._convert_constants(
            [*((n.inputs[i], d) for n, i, d in wanted), *((g.outputs[i], self.half) for g, i in outputs)]
        )
        for node, index, dtype in wanted:
            value = node.inputs[index]
            assert value is not None
            node.replace_input_with(index, self._as(value, dtype))
        for graph, index in outputs:
            self._output(graph, index)

    def _convert_constants(self, wanted: list[tuple[ir.Value | None, ir.DataType]]) -> None:
        """A constant that no island reads changes under its own name."""
        needs: dict[ir.Value, set[ir.DataType]] = {}
        for value, dtype in wanted:
            if value is not None and is_constant(value):
                needs.setdefault(value, set()).add(dtype)
        for constant, dtypes in needs.items():
            if dtypes == {self.half}:
                constant.const_value = self._lazy(constant, constant.name)
                self._set_type(constant)

    def _set_type(self, value: ir.Value) -> None:
        value.type = ir.TensorType(self.half)  # a fresh one: a cloned model shares the old with its original

    def _wanted(self, node: ir.Node) -> Iterator[tuple[ir.Node, int, ir.DataType]]:
        if node.op_type in _READS_ANY and node.domain == "":
            return
        schema = schema_of(node, self.model)
        for i, (value, slot) in enumerate(paired(node.inputs, schema.inputs if schema else None)):
            if is_float(value):
                fixed = slot is not None and slot.type_str == "tensor(float)"
                yield node, i, _FLOAT if fixed or node in self.islands else self.half

    def _retype(self, nodes: list[ir.Node], graphs: list[ir.Graph]) -> None:
        for graph in graphs:
            for entry in graph.inputs:
                if is_float(entry):
                    self._set_type(entry)
        for node in nodes:
            if node in self.islands:
                continue
            schema = schema_of(node, self.model)
            for value, slot in paired(node.outputs, schema.outputs if schema else None):
                if is_float(value) and not (slot is not None and slot.type_str == "tensor(float)"):
                    assert value is not None
                    self._set_type(value)
            self._retype_attributes(node)

    def _retype_attributes(self, node: ir.Node) -> None:
        name = _TYPE_ATTRIBUTE.get(node.op_type)
        if name is not None and node.attributes.get_int(name, 0) == _FLOAT:
            node.attributes[name] = ir.AttrInt64(name, int(self.half))
        if node.op_type == "ConstantOfShape":
            value = node.attributes.get_tensor("value")
            filled = value.numpy() if value is not None else np.zeros(1, np.float32)
            if filled.dtype == np.float32:
                node.attributes["value"] = ir.AttrTensor("value", ir.tensor(_narrowed(filled, self.half)))

    def _as(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """``value`` in ``dtype``: itself, a converted constant, or a cast shared by all who need it."""
        if value.dtype == dtype:
            return value
        if (value, dtype) not in self.casts:
            made = self._constant(value) if is_constant(value) else self._cast(value, dtype)
            self.casts[value, dtype] = made
        return self.casts[value, dtype]

    def _lazy(self, value: ir.Value, name: str | None) -> ir.LazyTensor:
        """Half-precision weights, converted each time they are read and never kept."""
        tensor, half = value.const_value, self.half
        assert tensor is not None
        shape = ir.Shape(list(tensor.shape.numpy()))
        return ir.LazyTensor(lambda: ir.tensor(_narrowed(tensor.numpy(), half)), half, shape, name=name)

    def _constant(self, value: ir.Value) -> ir.Value:
        """A second, half-precision copy of a constant that an island needs in float32."""
        graph, name = value.graph, self._unique(f"{value.name}_{self.half.numpy()}")
        assert isinstance(graph, ir.Graph)
        lazy = self._lazy(value, name)
        made = ir.Value(name=name, type=ir.TensorType(self.half), shape=value.shape, const_value=lazy)
        graph.register_initializer(made)
        return made

    def _cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        source, producer = value, value.producer()
        if producer is not None and producer.op_type == "Cast" and producer.inputs[0] is not None:
            source = producer.inputs[0]  # one cast instead of two
            if source.dtype == dtype:
                return source
        elif dtype == self.half and _exceeds(value, self.islands, _limit(dtype)):
            source = self._clip(value)
        node = self._insert("Cast", [source], value, dtype, {"to": int(dtype)})
        return node.outputs[0]

    def _clip(self, value: ir.Value) -> ir.Value:
        """A mask of -3.4e38 made in float32 must not become an infinity: softmax may see only those."""
        if not self.bounds:
            self.bounds = [self._bound("min", -_limit(self.half)), self._bound("max", _limit(self.half))]
        return self._insert("Clip", [value, *self.bounds], value, _FLOAT, {}).outputs[0]

    def _bound(self, which: str, limit: float) -> ir.Value:
        name = self._unique(f"{self.half.numpy()}_{which}")
        tensor = ir.tensor(np.array(limit, np.float32), name=name)
        bound = ir.Value(name=name, type=ir.TensorType(_FLOAT), shape=ir.Shape([]), const_value=tensor)
        self.model.graph.register_initializer(bound)
        return bound

    def _insert(
        self,
        op: str,
        inputs: list[ir.Value],
        origin: ir.Value,
        dtype: ir.DataType,
        attributes: dict[str, int],
    ) -> ir.Node:
        """Put a node right behind ``origin``, so that every graph nested below can read its result."""
        name = self._unique(f"{origin.name}_{dtype.numpy()}" if op == "Cast" else f"{origin.name}_{op.lower()}")
        node = ir.node(op, inputs, attributes, name=self._unique(f"node_{name}"))
        node.outputs[0].name, node.outputs[0].dtype, node.outputs[0].shape = name, dtype, origin.shape
        producer = origin.producer()
        if producer is None:
            graph = origin.graph
            assert isinstance(graph, ir.Graph)
            graph.insert_before(graph[0], node)
            return node
        node.metadata_props.update(producer.metadata_props)
        clipped = inputs[0].producer() if op == "Cast" else None
        after = clipped if clipped is not None and clipped.op_type == "Clip" and inputs[0] is not origin else producer
        assert isinstance(after.graph, ir.Graph)
        after.graph.insert_after(after, node)
        return node

    def _output(self, graph: ir.Graph, index: int) -> None:
        value = graph.outputs[index]
        if value.dtype == self.half:
            return
        made = self._as(value, self.half)
        if graph is self.model.graph and not any(made is o for o in graph.outputs):
            name, value.name = value.name, self._unique(f"{value.name}_float32")
            made.name = name
        graph.outputs[index] = made

    def _unique(self, name: str) -> str:
        candidate, i = name, 0
        while candidate in self.names:
            i += 1
            candidate = f"{name}_{i}"
        self.names.add(candidate)
        return candidate


def _limit(dtype: ir.DataType) -> float:
    return float(ml_dtypes.finfo(dtype.numpy()).max)  # type: ignore[no-untyped-call]


def _narrowed(array: np.ndarray[Any, Any], dtype: ir.DataType) -> np.ndarray[Any, Any]:
    """Convert, with finite values beyond the range at its end; infinities stay."""
    with np.errstate(over="ignore"):
        narrow = array.astype(dtype.numpy())
    beyond = np.isinf(narrow) & np.isfinite(array)
    if beyond.any():
        narrow[beyond] = np.sign(array[beyond]) * _limit(dtype)
    return narrow


def _exceeds(value: ir.Value, islands: set[ir.Node], limit: float) -> bool:
    """Whether a finite constant beyond ``limit`` takes part in computing ``value`` inside the islands."""
    pending, seen = [value], set()
    while pending:
        current = pending.pop()
        node = current.producer()
        if current.const_value is not None and current.dtype == _FLOAT:
            array = current.const_value.numpy()
            if bool(np.any(np.isfinite(array) & (np.abs(array) > limit))):
                return True
        if node in islands and node is not None and node not in seen and node.op_type not in _BOUNDED:
            seen.add(node)
            pending += [v for v in node.inputs if v is not None]
    return False
