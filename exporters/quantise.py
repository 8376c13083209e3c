"""Weights of a graph in 8 or 4 bits, behind a standard DequantizeLinear.

ONNX Runtime fuses that operator and the product behind it into one of its own when it loads the file, and TensorRT
builds both; the activations, the router, its scores and the choice stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnxruntime.capi._pybind_state import quantize_qdq_matmul_4bits
from onnxscript import version_converter

from modpass.errors import ExportError, InputError
from modpass.exporters.islands import is_constant, module_scopes

__all__ = ["Weights", "quantise"]

Weights = Literal["int8", "int4", "fp8"]
Array = np.ndarray[Any, Any]

BLOCK = 32  # input channels that share one scale of int4: what ONNX Runtime and TensorRT both take
_OPSET = 21  # the first with int4 and scales per block
_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


@dataclass(frozen=True)
class _Quantised:
    """A weight [K, N] in few bits, its scales, and how DequantizeLinear applies them."""

    weight: ir.TensorProtocol
    scale: Array
    attributes: dict[str, int]


def quantise(model: ir.Model, weights: Weights, *, keep: Collection[str] = ("router", "predictor")) -> ir.Model:
    """Copy ``model`` with the weights of its MatMul and Gemm in 8 or 4 bits, at opset 21; the original is unchanged.

    "int8" has one scale per output channel, "int4" one per 32 input channels (ONNX Runtime's own kernel), "fp8" is
    E4M3 with one scale per output channel. All are symmetric, as TensorRT wants it. A weight that something else
    reads too (an embedding that is also the head) stays.

    Args:
        model: as ``export_onnx`` or ``to_precision`` makes it.
        weights: how.
        keep: nodes recorded inside a torch module of such a name stay.

    Raises:
        InputError: another kind of weights.
        ExportError: there is no weight to quantise.

    >>> text = '<ir_version: 10, opset_import: ["": 18]> g (float[1,2] x) => (float[1,1] y)'
    >>> model = ir.from_onnx_text(text + '<float[2,1] w = {1.0, -0.5}> {y = MatMul(x, w)}')
    >>> [n.op_type for n in quantise(model, "int8").graph]
    ['DequantizeLinear', 'MatMul']
    """
    if weights not in get_args(Weights):
        raise InputError(f"weights are to be {weights!r}; allowed are {', '.join(map(repr, get_args(Weights)))}")
    copy = model.clone()
    version_converter.convert_version(copy, max(_OPSET, copy.opset_imports[""]))
    found = list(_products(copy, keep))
    if not found:
        raise ExportError("no MatMul or Gemm of this model has a weight of its own to quantise; export it as it is")
    shared: dict[tuple[ir.Value, bool], ir.Value] = {}
    for node, weight in found:
        turned = node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1
        if (weight, turned) not in shared:
            shared[weight, turned] = _dequantised(copy.graph, weight, _KINDS[weights], turned)
        node.replace_input_with(1, shared[weight, turned])
        if turned:
            node.attributes["transB"] = ir.AttrInt64("transB", 0)
    for weight in {w for _, w in found}:
        copy.graph.initializers.pop(str(weight.name))
    copy.graph.sort()
    return copy


def _products(model: ir.Model, keep: Collection[str]) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Products with a two-dimensional constant on the right that only products read."""

    def weighs(node: ir.Node, index: int) -> bool:
        kept = any(part in keep for scope in module_scopes(node) for part in scope.split("."))
        return node.op_type in ("MatMul", "Gemm") and node.domain == "" and index == 1 and not kept

    for value in list(model.graph.initializers.values()):
        uses = value.uses()
        matrix = is_constant(value) and value.dtype in _FLOATS and value.shape is not None and len(value.shape) == 2
        if matrix and uses and not value.is_graph_output() and all(weighs(u.node, u.idx) for u in uses):
            yield from ((u.node, value) for u in uses)


def _dequantised(graph: ir.Graph, weight: ir.Value, kind: Callable[[Array], _Quantised], turned: bool) -> ir.Value:
    tensor, name = weight.const_value, str(weight.name)
    assert tensor is not None
    assert weight.dtype is not None
    array = tensor.numpy().astype(np.float32)
    made = kind(np.ascontiguousarray(array.T if turned else array))
    stored = _initializer(graph, f"{name}.quantised", made.weight)
    scale = _initializer(graph, f"{name}.scale", ir.tensor(made.scale.astype(weight.dtype.numpy())))
    node = ir.node("DequantizeLinear", [stored, scale], made.attributes, name=f"dequantise {name}")
    node.outputs[0].name, node.outputs[0].type = f"{name}.dequantised", ir.TensorType(weight.dtype)
    node.outputs[0].shape = stored.shape
    graph.append(node)
    return node.outputs[0]


def _initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(list(tensor.shape.numpy())))
    value.const_value = tensor
    graph.register_initializer(value)
    return value


def _scaled(weight_KN: Array, largest: float) -> tuple[Array, Array]:
    """The weight with each output channel's largest value at ``largest``, and the scales; a channel of zeros stays."""
    scale_N = np.abs(weight_KN).max(0, initial=0.0) / largest
    scale_N = np.where(scale_N > 0, scale_N, 1.0).astype(np.float32)
    return weight_KN / scale_N, scale_N


def _int8(weight_KN: Array) -> _Quantised:
    # ONNX Runtime's quantisers write weights alone either in an operator of its own or in 4 bits
    scaled, scale_N = _scaled(weight_KN, 127.0)
    return _Quantised(ir.tensor(np.rint(scaled).astype(np.int8)), scale_N, {"axis": 1})


def _fp8(weight_KN: Array) -> _Quantised:
    kind = ml_dtypes.float8_e4m3fn
    scaled, scale_N = _scaled(weight_KN, float(ml_dtypes.finfo(kind).max))  # type: ignore[no-untyped-call]
    return _Quantised(ir.tensor(scaled.astype(kind)), scale_N, {"axis": 1})


def _int4(weight_KN: Array) -> _Quantised:
    K, N = weight_KN.shape
    blocks = -(-K // BLOCK)
    packed, unused = np.zeros((K * N + 1) // 2, np.uint8), np.zeros((N * blocks + 1) // 2, np.uint8)
    scale = np.zeros((blocks, N), np.float32)
    # its public home, onnxruntime.quantization.matmul_nbits_quantizer, sets the root logger's level when imported
    quantize_qdq_matmul_4bits(packed, weight_KN, scale, unused, BLOCK, N, K, True)
    tensor = ir.PackedTensor(packed, ir.DataType.INT4, shape=ir.Shape([K, N]))
    return _Quantised(tensor, scale, {"axis": 0, "block_size": BLOCK})


_KINDS: dict[str, Callable[[Array], _Quantised]] = {"int8": _int8, "int4": _int4, "fp8": _fp8}
