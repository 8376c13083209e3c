"""A model exported once for all runners that read ONNX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from modpass import RoutedModel
from modpass.bench.inputs import shape_of
from modpass.exporters import export_onnx

__all__ = ["onnx_file"]


def onnx_file(model: RoutedModel, inputs: Mapping[str, Tensor], workdir: Path) -> Path:
    """The model as ONNX in ``workdir`` at the shape of ``inputs``; written by the first runner that asks.

    Raises:
        ExportError: the model cannot be exported.
    """
    path = workdir / "model.onnx"
    if not path.exists():
        export_onnx(model, path, shape_of(model.inputs, inputs))
    return path
