"""Small ONNX models written as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from modpass.exporters.preflight import preflight

WEIGHTS = ",".join(str(i / 256) for i in range(256))
MLP = f"(float[1,8,16] x) => (float[1,8,16] y) <float[16,16] w = {{{WEIGHTS}}}>" + "{a = MatMul(x, w) y = Relu(a)}"


def text(body: str, opset: int = 18, domains: str = "") -> str:
    return f'<ir_version: 10, opset_import: ["": {opset}{domains}]> g {body}'


def write(path: Path, body: str, opset: int = 18, domains: str = "") -> Path:
    proto = onnx.parser.parse_model(text(body, opset, domains))
    onnx.save(onnx.shape_inference.infer_shapes(proto), str(path))
    return path


def topk(k: int, length: int, scope: str = "layers.3") -> ir.Model:
    """Scores, TopK, and the index sort that follows it, recorded as inside the module ``scope``."""
    body = (
        f"(float[1,{length}] s) => (float[1,{k}] v, int64[1,{k}] i) <int64[1] k = {{{k}}}> "
        "{v, u = TopK(s, k) i, j = TopK<largest = 0>(u, k)}"
    )
    proto = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text(body)))
    model: ir.Model = ir.from_proto(proto)
    for node in model.graph:
        node.metadata_props["pkg.torch.onnx.name_scopes"] = repr(["", scope, "topk"])
    return model


def reasons(body: str, opset: int = 18, domains: str = "", **target: Any) -> str:
    proto = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text(body, opset, domains)))
    return "\n".join(str(r) for r in preflight(ir.from_proto(proto), **target))
