"""What TensorRT would refuse, found in the ONNX graph before TensorRT is imported.

Each rule stands for a parser or builder error that was observed with TensorRT-RTX 1.7, or that its operator
pages state; the parser alone accepts some of them, and they only surface minutes into a build.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from modpass.bisect import TOPK_LIMIT
from modpass.exporters.islands import is_constant, module_scopes
from modpass.exporters.manifest import Manifest
from modpass.exporters.trt_api import Flavor, find, parse_capability

__all__ = ["TOPK_LIMIT", "Refusal", "preflight"]

_BOTH = {
    "BitShift", "Compress", "ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv",
    "QLinearMatMul", "Unique",
}  # fmt: skip
_RTX_ONLY = {"BitCast", "NonZero"}  # RTX ships no plugins; full TensorRT has one for NonZero
_MICROSOFT = {"MatMulNBits", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"}
_FLOAT8 = {
    ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E4M3FNUZ, ir.DataType.FLOAT8E5M2,
    ir.DataType.FLOAT8E5M2FNUZ,
}  # fmt: skip
_FLOAT8_CONSUMERS = {
    "Concat", "DequantizeLinear", "Flatten", "Identity", "Reshape", "Shape", "Squeeze", "Transpose",
    "Unsqueeze",
}  # fmt: skip


@dataclass(frozen=True)
class Refusal:
    """One reason why the build would fail, with the ONNX node and the block or torch module it is in."""

    reason: str
    node: str | None = None
    block: str | None = None

    def __str__(self) -> str:
        place = f"block '{self.block}'" if self.block else f"node '{self.node}'" if self.node else "the model"
        return f"{place}: {self.reason}"


@dataclass(frozen=True)
class _Context:
    manifest: Manifest | None
    flavor: Flavor
    capability: tuple[int, int]

    @property
    def target(self) -> str:
        return f"{self.flavor.title} for compute capability {self.capability[0]}.{self.capability[1]}"

    @property
    def rtx(self) -> bool:
        return bool(self.flavor.capabilities)

    def refuse(self, node: ir.Node, reason: str) -> Refusal:
        return Refusal(reason, _name(node), self.block_of(node))

    def block_of(self, node: ir.Node) -> str | None:
        """The routed block of the manifest that holds the node, else the innermost torch module."""
        scopes = module_scopes(node)
        routed = self.manifest.routed_blocks if self.manifest else {}
        inside = [b for b in routed if any(s == b or s.startswith(f"{b}.") for s in scopes)]
        indices = [b for b, spec in routed.items() if spec.indices in {o.name for o in node.outputs}]
        return next(iter([*indices, *sorted(inside, key=len, reverse=True), *reversed(scopes)]), None)


def preflight(
    model: ir.Model | str | os.PathLike[str],
    manifest: Manifest | None = None,
    flavor: str = "tensorrt-rtx",
    compute_capability: str = "8.9",
) -> list[Refusal]:
    """List everything in ``model`` that TensorRT would refuse; an empty list means: go and build.

    ``model`` is not changed. ``manifest`` gives the names of the routed blocks.

    Raises:
        InputError: no such flavour, or a compute capability not of the form ``major.minor``.

    >>> text = '<ir_version: 8, opset_import: ["": 18]> g (double[2] x) => (double[2] y) {y = Neg(x)}'
    >>> [r.node for r in preflight(ir.from_onnx_text(text))]
    ['x', 'y']
    """
    context = _Context(manifest, find(flavor), parse_capability(compute_capability))
    model = model if isinstance(model, ir.Model) else ir.load(model)
    functions = {(f.domain, f.name) for f in model.functions.values()}
    nodes = [pair for g in (model.graph, *model.functions.values()) for pair in _walk(g)]
    refusals = [*_target(context), *_boundary(model.graph), *_types([n for n, _ in nodes], context)]
    for node, inside_if in nodes:
        if (node.domain, node.op_type) not in functions:
            refusals += _operator(node, inside_if, context)
    return refusals


def _target(context: _Context) -> Iterator[Refusal]:
    known = context.flavor.capabilities
    wanted = f"{context.capability[0]}.{context.capability[1]}"
    if known and wanted not in known:
        yield Refusal(f"{context.flavor.title} builds for {', '.join(known)}, not for {wanted}")
    elif context.capability < (7, 5):
        yield Refusal(f"{context.flavor.title} needs compute capability 7.5 or later, not {wanted}")


def _boundary(graph: ir.Graph) -> Iterator[Refusal]:
    for role, values in (("input", graph.inputs), ("output", graph.outputs)):
        for value in values:
            shape = value.shape
            if shape is None or not shape.is_static():
                found = "no known shape" if shape is None else f"shape {shape}"
                yield Refusal(
                    f"{role} has {found}, every dim must be an integer; "
                    "export with a FixedShape that gives each of them",
                    value.name,
                )
            if value.dtype == ir.DataType.DOUBLE:
                yield Refusal(
                    f"{role} is float64, which TensorRT would silently turn into float32; "
                    "export the model in float32, float16 or bfloat16",
                    value.name,
                )


def _types(nodes: list[ir.Node], context: _Context) -> Iterator[Refusal]:
    """Data types that the target's hardware lacks: one refusal for each, at the first node that has it."""
    rules = [
        ("bfloat16", {ir.DataType.BFLOAT16}, (8, 0), "float16 or float32"),
        ("float8", _FLOAT8, (8, 9), "float16, bfloat16 or int8"),
    ]
    for name, dtypes, needs, cure in rules:
        if context.capability >= needs:
            continue
        for node in nodes:
            if any(v is not None and v.dtype in dtypes for v in (*node.inputs, *node.outputs)):
                yield context.refuse(
                    node,
                    f"{name} needs compute capability {needs[0]}.{needs[1]} or later, the target is "
                    f"{context.capability[0]}.{context.capability[1]}; export with dtype {cure}",
                )
                break


def _operator(node: ir.Node, inside_if: bool, context: _Context) -> Iterator[Refusal]:
    yield from _unsupported(node, context)
    if node.domain not in ("", "ai.onnx"):
        return
    if node.op_type == "TopK":
        yield from _topk(node, context)
    if node.op_type in ("ScatterElements", "ScatterND"):
        yield from _scatter(node, context)
    if node.op_type == "Attention":
        yield from _attention(node, inside_if, context)
    if node.op_type == "TensorScatter":
        yield from _tensor_scatter(node, context)
    if node.op_type == "If":
        yield from _condition(node, context)
    turing = context.rtx and context.capability == (7, 5)
    if turing and node.op_type in ("MatMul", "Gemm") and _dtype(node, 0) == ir.DataType.FLOAT:
        reason = f"float32 {node.op_type} does not exist in {context.target}; export in float16"
        yield context.refuse(node, reason)
    float8 = any(v is not None and v.dtype in _FLOAT8 and not is_constant(v) for v in node.inputs)
    if float8 and node.op_type not in _FLOAT8_CONSUMERS:
        yield context.refuse(node, f"{node.op_type} cannot read float8; quantise after it, on its result")


def _unsupported(node: ir.Node, context: _Context) -> Iterator[Refusal]:
    standard = node.domain in ("", "ai.onnx")
    if standard and (node.op_type in _BOTH or (context.rtx and node.op_type in _RTX_ONLY)):
        yield context.refuse(
            node,
            f"{context.flavor.title} has no {node.op_type}; export a graph without it (no data-dependent "
            "shapes, QuantizeLinear and DequantizeLinear instead of integer arithmetic)",
        )
    elif node.domain == "com.microsoft":
        if node.op_type not in _MICROSOFT:
            yield context.refuse(
                node,
                f"{context.flavor.title} has no com.microsoft.{node.op_type}; do not run ONNX Runtime's "
                "optimiser or quantiser before TensorRT",
            )
        elif node.op_type == "MatMulNBits" and _dtype(node, 0) != ir.DataType.FLOAT16:
            yield context.refuse(node, "com.microsoft.MatMulNBits reads float16 only; export in float16")
    elif not standard and context.rtx:
        yield context.refuse(
            node,
            f"TensorRT-RTX has no plugins, so no {node.domain}.{node.op_type}; use standard ONNX operators",
        )


def _topk(node: ir.Node, context: _Context) -> Iterator[Refusal]:
    k = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
    if k is None:
        yield context.refuse(
            node, "TopK's k is computed at run time; export with a FixedShape, so that it is a constant"
        )
        return
    count = int(np.asarray(k.numpy()).reshape(-1)[0])
    if count <= TOPK_LIMIT:
        return
    block = context.block_of(node)
    routed = context.manifest.routed_blocks.get(block or "") if context.manifest else None
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    length: object = None
    if routed is not None:
        length = routed.sequence
    elif shape is not None:
        length = shape[node.attributes.get_int("axis", -1)]
    cure = "lower its capacity or export a shorter sequence"
    if isinstance(length, int):
        highest = math.floor(1e4 * TOPK_LIMIT / length) / 1e4
        cure = f"give it a capacity of at most {highest}, or export a shorter sequence"
    yield context.refuse(
        node,
        f"TopK {'sorts' if _integer(node) else 'selects'} k={count} of S={length} tokens, "
        f"{context.flavor.title}'s limit is k <= {TOPK_LIMIT}; {cure}",
    )


def _scatter(node: ir.Node, context: _Context) -> Iterator[Refusal]:
    reduction = node.attributes.get_string("reduction", "none")
    # full TensorRT ships a plugin for ScatterElements with a reduction, but none for ScatterND
    if reduction != "none" and (context.rtx or node.op_type == "ScatterND"):
        yield context.refuse(
            node,
            f"{node.op_type} has reduction '{reduction}', {context.flavor.title} has only 'none'; "
            "gather the rows, combine them, and overwrite",
        )


def _attention(node: ir.Node, inside_if: bool, context: _Context) -> Iterator[Refusal]:
    """ONNX Attention (opset 23): TensorRT runs it only through a fused kernel."""
    cure = "export with opset 18, where attention is decomposed and TensorRT fuses it by itself"
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    heads = node.attributes.get_int("q_num_heads", 0)
    size = None
    if shape is not None and isinstance(shape[-1], int):
        size = shape[-1] // heads if len(shape) == 3 and heads else shape[-1]
    if _dtype(node, 0) == ir.DataType.FLOAT and not (shape is not None and shape[-2] == 1):
        yield context.refuse(node, f"Attention in float32 has no fused kernel; {cure}, or export in float16")
    if size is not None and not 8 < size <= 256:
        yield context.refuse(node, f"Attention has head size {size}, fused kernels have 9 to 256; {cure}")
    if sum(bool(o.name) and bool(o.uses() or o.is_graph_output()) for o in node.outputs) > 1:
        yield context.refuse(node, f"Attention has several outputs, TensorRT supports one; {cure}")
    for name in ("softcap", "softmax_precision", "qk_matmul_output_mode"):
        if name in node.attributes and node.attributes[name].value:
            yield context.refuse(node, f"Attention has {name}={node.attributes[name].value}, unsupported; {cure}")
    mask = _dtype(node, 3)
    if mask not in (None, ir.DataType.BOOL, _dtype(node, 0)):
        yield context.refuse(node, f"Attention's mask is {mask}, its query {_dtype(node, 0)}; {cure}")
    if inside_if:
        yield context.refuse(node, f"Attention cannot be inside If; {cure}")


def _tensor_scatter(node: ir.Node, context: _Context) -> Iterator[Refusal]:
    cache = node.inputs[0]
    if (mode := node.attributes.get_string("mode", "linear")) != "linear":
        yield context.refuse(node, f"TensorScatter has mode '{mode}', only 'linear' is supported")
    if cache is not None and cache.shape is not None and len(cache.shape) != 4:
        yield context.refuse(node, f"TensorScatter's cache has {len(cache.shape)} dims, it must have 4")
    if cache is not None and not (cache.is_graph_input() and node.outputs[0].is_graph_output()):
        yield context.refuse(
            node,
            "TensorScatter's cache must be an input of the network and its result an output; use ScatterND",
        )


def _condition(node: ir.Node, context: _Context) -> Iterator[Refusal]:
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    if shape is not None and shape.is_static() and np.prod(shape.numpy(), dtype=np.int64) != 1:
        yield context.refuse(node, f"If has a condition of shape {shape}, it must be one bool")


def _walk(nodes: Iterable[ir.Node], inside_if: bool = False) -> Iterator[tuple[ir.Node, bool]]:
    for node in nodes:
        yield node, inside_if
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from _walk(attribute.as_graph(), inside_if or node.op_type == "If")
            elif attribute.type == ir.AttributeType.GRAPHS:
                for graph in attribute.as_graphs():
                    yield from _walk(graph, inside_if)


def _integer(node: ir.Node) -> bool:
    return _dtype(node, 0) in (ir.DataType.INT32, ir.DataType.INT64)


def _dtype(node: ir.Node, index: int) -> ir.DataType | None:
    value = node.inputs[index] if index < len(node.inputs) else None
    return None if value is None else value.dtype


def _name(node: ir.Node) -> str | None:
    return node.name or next((f"node_of_{o.name}" for o in node.outputs if o.name), None)
