"""The weights of an engine that was built without them, from the ONNX file that it was built from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modpass.errors import BuildError, VerificationError
from modpass.exporters.external import check_external
from modpass.exporters.plan import CheckedPlan
from modpass.exporters.trt_api import TensorRT
from modpass.files import sha256

__all__ = ["put_weights"]


def put_weights(tensorrt: TensorRT, engine: Any, plan: CheckedPlan, source: Path) -> None:
    """Fill a stripped ``engine`` with the weights of ``source``.

    Raises:
        VerificationError: it is not the file that the engine was built from, or reads outside of its folder.
        BuildError: TensorRT refuses it.

    Source: TensorRT developer guide, "Refitting a Weight-Stripped Engine Directly from ONNX".
    """
    if not source.is_file() or sha256(source) != plan.manifest.onnx_sha256:
        raise VerificationError(
            f"'{plan.path}' holds no weights, and '{source}' is not the file that it was built from; put that there, "
            f"or build again without strip_weights"
        )
    check_external(source)
    tensorrt.log.messages.clear()
    refitter = tensorrt.module.Refitter(engine, tensorrt.logger)
    parser = tensorrt.module.OnnxParserRefitter(refitter, tensorrt.logger)
    if not parser.refit_from_file(str(source.resolve())) or not refitter.refit_cuda_engine():
        said = tensorrt.log.first_error() or "it gave no reason"
        raise BuildError(
            f"{tensorrt.flavor.title} {tensorrt.version} took no weights of '{source}' into '{plan.path}': {said}"
        )
