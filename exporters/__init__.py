"""From a graph module to ONNX and TensorRT, and the proof that the result computes the same."""

from modpass.exporters.manifest import Manifest, manifest_path
from modpass.exporters.onnx import export_onnx
from modpass.exporters.preflight import preflight
from modpass.exporters.shapes import FixedShape
from modpass.exporters.tensorrt import build_engine
from modpass.exporters.verify import Difference, VerificationReport, verify

__all__ = [
    "Difference",
    "FixedShape",
    "Manifest",
    "VerificationReport",
    "build_engine",
    "export_onnx",
    "manifest_path",
    "preflight",
    "verify",
]
