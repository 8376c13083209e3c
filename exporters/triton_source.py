"""What a Triton repository is made of: exported files, each as its manifest describes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modpass.errors import ExportError, InputError
from modpass.exporters.bucket_manifest import BucketManifest, label
from modpass.exporters.manifest import Manifest, manifest_path

__all__ = ["Model", "Source", "read_source"]

Source = str | os.PathLike[str]


@dataclass(frozen=True)
class Model:
    """One file that becomes a model."""

    path: Path
    manifest: Manifest

    @property
    def label(self) -> str:
        """The name of its shape, such as ``"8x1024"``."""
        shape = self.manifest.shape
        return label(shape["batch"], shape.get("sequence"))


def read_source(source: Source | Sequence[Source]) -> tuple[Path | None, list[Model]]:
    """The folder of buckets, if it is one, and the files, hashed.

    Raises:
        InputError, StateError, VerificationError, ExportError: see ``export_triton``.

    >>> read_source([])
    Traceback (most recent call last):
    modpass.errors.InputError: no file was given; give a folder of buckets, or ONNX files or engines
    """
    paths = [Path(source)] if isinstance(source, str | os.PathLike) else [Path(s) for s in source]
    folder = paths[0] if len(paths) == 1 and paths[0].is_dir() else None
    if folder is not None:
        buckets = BucketManifest.load(folder)
        buckets.check(folder)
        paths = [folder / b.file for b in buckets.buckets]
    if not paths:
        raise InputError("no file was given; give a folder of buckets, or ONNX files or engines")
    return folder, [_checked(p) for p in paths]


def _checked(path: Path) -> Model:
    """A file that Triton can serve."""
    if not path.is_file():
        raise InputError(f"there is no file '{path}'")
    manifest = Manifest.load(manifest_path(path))
    manifest.check(path)
    if manifest.kind == "engine" and manifest.flavor != "tensorrt":
        raise ExportError(
            f"'{path}' is an engine of {manifest.flavor}, which Triton's TensorRT backend does not load; build it with "
            f"flavor='tensorrt', or serve the ONNX file"
        )
    if manifest.stripped:
        raise ExportError(f"'{path}' is an engine without its weights, which Triton cannot put back; build it whole")
    if manifest.kind == "onnx" and manifest.dtype == "bfloat16":
        raise ExportError(
            f"'{path}' is in bfloat16, which ONNX Runtime has no kernels for; export in float16, or build an engine"
        )
    if not manifest.inputs or not isinstance(manifest.shape.get("batch"), int):
        raise ExportError(f"the manifest of '{path}' lists no input or no batch; export the model again")
    return Model(path, manifest)
