"""From a graph module to ONNX and TensorRT, and the proof that the result computes the same."""

from modpass.exporters.backend import Backend, OnnxRuntimeBackend
from modpass.exporters.bucket_manifest import BucketManifest
from modpass.exporters.bucket_session import BucketSession
from modpass.exporters.buckets import export_buckets
from modpass.exporters.checks import Verdict
from modpass.exporters.decoder import export_decoder
from modpass.exporters.decoder_manifest import DecoderManifest
from modpass.exporters.manifest import Manifest, manifest_path
from modpass.exporters.onnx import export_onnx
from modpass.exporters.onnx_device import OnnxRuntimeCudaBackend
from modpass.exporters.plan_report import PlanReport, plan_report
from modpass.exporters.preflight import preflight
from modpass.exporters.session import DecoderSession, Generation, Statistics
from modpass.exporters.shapes import FixedShape
from modpass.exporters.tensorrt import build_engine
from modpass.exporters.tensorrt_backend import TensorRTBackend
from modpass.exporters.triton import export_triton
from modpass.exporters.verdict import verdict
from modpass.exporters.verify import Difference, VerificationReport, verify

__all__ = [
    "Backend",
    "BucketManifest",
    "BucketSession",
    "DecoderManifest",
    "DecoderSession",
    "Difference",
    "FixedShape",
    "Generation",
    "Manifest",
    "OnnxRuntimeBackend",
    "OnnxRuntimeCudaBackend",
    "PlanReport",
    "Statistics",
    "TensorRTBackend",
    "Verdict",
    "VerificationReport",
    "build_engine",
    "export_buckets",
    "export_decoder",
    "export_onnx",
    "export_triton",
    "manifest_path",
    "plan_report",
    "preflight",
    "verdict",
    "verify",
]
