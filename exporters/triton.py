"""Exported files -> a model repository of NVIDIA Triton Inference Server, one model for each shape.

Triton loads a model from its own directory, and ONNX Runtime reads weights from beside the graph alone; so weights
that several models share are hard links of one file, or copies where the file system has none.
Source: Triton Inference Server, "Model Repository" and "Model Configuration".
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from modpass.errors import InputError
from modpass.exporters.bucket_manifest import Bucket, BucketManifest, check_files
from modpass.exporters.manifest import Manifest, manifest_path
from modpass.exporters.own_folder import own_folder
from modpass.exporters.sealed import read_sealed, write_sealed
from modpass.exporters.triton_config import Instances, config_text
from modpass.exporters.triton_source import Model, Source, read_source
from modpass.files import sha256, whole_directory
from modpass.version import __version__

__all__ = ["FILE", "check_repository", "export_triton"]

FILE, SCHEMA = "triton.json", 1
KINDS = ("auto", "cpu", "gpu")
_PLATFORMS = {"onnx": ("onnxruntime_onnx", "model.onnx"), "engine": ("tensorrt_plan", "model.plan")}


def export_triton(
    source: Source | Sequence[Source],
    repository: Source,
    name: str | None = None,
    *,
    instances: int = 1,
    kind: str = "auto",
    threads: int | None = None,
    warmup: bool = True,
) -> list[str]:
    """Write a Triton model repository of what was exported, and return the names of its models.

    Args:
        source: a folder of ``export_buckets``, or files of ``export_onnx`` and ``build_engine`` (full TensorRT, not
            RTX) with their manifests; all are hashed first.
        repository: written whole or not at all; an older one of modpass is replaced, any other folder refused.
        name: each model is called ``<name>_<batch>x<sequence>``; by default after the folder or the first file.
        instances: copies of each model that run side by side.
        kind: where: "cpu", "gpu", or "auto" (a GPU if the server has one).
        threads: processor threads of an operator in ONNX Runtime; None leaves it to that.
        warmup: run each model once before it is ready.

    Raises:
        InputError: a source that is none, or an argument out of range.
        StateError: a manifest is missing or cannot be read.
        VerificationError: a file is not the one that its manifest was written for.
        ExportError: Triton cannot run a file.

    >>> import tempfile
    >>> from modpass.decode.example import tiny_decoder
    >>> from modpass.exporters.buckets import export_buckets
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = export_buckets(tiny_decoder(), folder / "tiny", [(1, 4), (2, 8)])
    >>> export_triton(folder / "tiny", folder / "repository")
    ['tiny_1x4', 'tiny_2x8']
    """
    own_folder(repository, FILE)
    options = _Options(Instances(_count(instances, "instances"), kind), threads, warmup)
    options.check()
    folder, models = read_source(source)
    name = _name(name if name is not None else (folder or models[0].path.with_suffix("")).resolve().name)
    if kind == "cpu" and any(m.manifest.kind == "engine" for m in models):
        raise InputError("kind is 'cpu', but an engine runs on a GPU; give kind='gpu', or the ONNX files")
    names = [f"{name}_{m.label}" for m in models]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise InputError(f"two files have the shape of '{twice}'; a repository has one model for each")
    with whole_directory(repository) as temporary:
        for title, model in zip(names, models, strict=True):
            _write(temporary / title, title, model, options)
        if folder is not None:
            _buckets(folder, temporary, name)
        _note(temporary, dict(zip(names, models, strict=True)))
    return names


@dataclass(frozen=True)
class _Options:
    instances: Instances
    threads: int | None
    warmup: bool

    def check(self) -> None:
        if self.instances.kind not in KINDS:
            raise InputError(f"kind is {self.instances.kind!r}; it must be one of {', '.join(map(repr, KINDS))}")
        if self.threads is not None:
            _count(self.threads, "threads")


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} is {value!r}; it must be a whole number of 1 or more")
    return value


def _name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise InputError(f"name is {name!r}; a model's is of letters, digits, '_', '.' and '-'")
    return name


def _write(directory: Path, title: str, model: Model, options: _Options) -> None:
    manifest = model.manifest
    platform, file = _PLATFORMS[manifest.kind]
    version = directory / "1"
    version.mkdir(parents=True)
    shutil.copyfile(model.path, version / file)
    for part in (manifest.data, manifest.probe):
        if part is not None:
            _link(model.path.parent / part.file, version / part.file, directory.parent)
    replace(manifest, file=file).save(manifest_path(version / file))
    text = config_text(
        title, platform, manifest.inputs, manifest.outputs, file=file, instances=options.instances,
        threads=options.threads if manifest.kind == "onnx" else None,
        warmup=dict(_samples(directory, manifest)) if options.warmup else None,
    )  # fmt: skip
    (directory / "config.pbtxt").write_text(text, encoding="utf-8")


def _samples(directory: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Write what the warm-up reads: a padding mask of ones. Zeros do for the rest, and are valid ids."""
    mask = str(manifest.settings.get("padding_mask") or "attention_mask")
    for spec in manifest.inputs:
        if spec.name == mask:
            (directory / "warmup").mkdir()
            np.ones(spec.shape, np.dtype(spec.dtype)).tofile(directory / "warmup" / mask)
            yield mask, mask


def _link(source: Path, target: Path, repository: Path) -> None:
    """A copy of the source, which other models of the repository share by a hard link where that is possible."""
    for other in repository.glob(f"*/1/{source.name}"):
        if other.stat().st_size == source.stat().st_size and sha256(other) == sha256(source):
            try:
                os.link(other, target)
            except OSError:
                break
            return
    shutil.copyfile(source, target)


def _buckets(folder: Path, repository: Path, name: str) -> None:
    """The buckets' own manifest with the repository's paths, so that a client can choose and pad by it."""
    manifest = BucketManifest.load(folder)
    moved = {b.file: f"{name}_{b.label}/1/model.onnx" for b in manifest.buckets}
    buckets = tuple(Bucket(b.batch, b.sequence, moved[b.file]) for b in manifest.buckets)
    paths = [str(p.relative_to(repository)) for p in sorted(repository.glob("*/1/*")) if p.suffix in (".onnx", ".bin")]
    files = {p: sha256(repository / p) for p in paths}
    replace(manifest, buckets=buckets, files=files).save(repository)


def _note(repository: Path, models: Mapping[str, Model]) -> None:
    """Write ``triton.json``: the models, and the SHA-256 of every file that the server reads."""
    served = (p for p in sorted(repository.rglob("*")) if p.is_file() and p.suffix not in (".json", ".safetensors"))
    facts = {
        "kind": "triton",
        "models": {
            n: {"platform": _PLATFORMS[m.manifest.kind][0], "shape": m.manifest.shape} for n, m in models.items()
        },
        "versions": {"modpass": __version__},
        "files": {p.relative_to(repository).as_posix(): sha256(p) for p in served},
    }
    write_sealed(repository / FILE, SCHEMA, facts)


def check_repository(repository: Source) -> int:
    """Hash again what a repository serves; how many files.

    Raises:
        StateError: it is no repository of modpass, or its ``triton.json`` has changed.
        VerificationError: a file is missing or has changed.
    """
    missing = "'modpass export --triton' writes one"
    files = read_sealed(Path(repository, FILE), SCHEMA, missing, "export it again")["files"]
    check_files(Path(repository), files, FILE)
    return len(files)
