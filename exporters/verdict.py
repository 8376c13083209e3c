"""Is an export what it was when it was written? Every check, and one verdict; nothing is written.

Bytes are hashed before anything parses them, and parsed before anything runs them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from modpass.errors import StateError
from modpass.exporters import bucket_manifest, triton
from modpass.exporters.checks import Series, Verdict
from modpass.exporters.decoder_manifest import FILE, TOKENIZER
from modpass.exporters.file_checks import Model, check_buckets, check_decoder, check_file, check_triton
from modpass.exporters.manifest import manifest_path
from modpass.exporters.within import within

__all__ = ["verdict"]

_EXPORTED = (".onnx", ".engine", ".plan")


def verdict(path: str | os.PathLike[str], model: Model = None) -> Verdict:
    """Check one exported file, or every one in a folder and the folders below it.

    Hashes, external data, shapes, dtypes and routed blocks against the graph itself, an engine's target against this
    machine, and the outputs: against the ``model`` that was exported, else against what it computed then (its probe).

    Raises:
        StateError: there is nothing that modpass exported.

    >>> verdict("absent.onnx")
    Traceback (most recent call last):
    modpass.errors.StateError: there is no 'absent.onnx'
    """
    target = Path(path)
    if not target.exists():
        raise StateError(f"there is no '{target}'")
    if target.is_file() and target.name != FILE:
        file = target.with_suffix("") if target.suffix == ".json" else target
        return Verdict(check_file(file, file.name, model).checks)
    if model is not None:
        raise StateError(f"'{target}' is a folder; a model is compared with one ONNX file: name that")
    folder = target if target.is_dir() else target.parent
    return Verdict([c for series in _folder(folder) for c in series.checks])


def _folder(root: Path) -> Iterator[Series]:
    links = Series(".")
    links.run("links", lambda: _no_way_out(root))
    yield links
    if links.checks[0].result == "failed":
        return
    decoders = sorted(p.parent for p in root.rglob(FILE))
    files = sorted({f for p in root.rglob("*") if (f := _exported(p)) and TOKENIZER not in f.relative_to(root).parts})
    if not decoders and not files:
        raise StateError(
            f"'{root}' holds nothing that modpass exported: no ONNX file, engine or '{FILE}'; name the folder of one"
        )
    for folder in decoders:
        yield check_decoder(folder, _label(folder / FILE, root))
    for name, check in ((bucket_manifest.FILE, check_buckets), (triton.FILE, check_triton)):
        for path in sorted(root.rglob(name)):
            yield check(path.parent, _label(path, root))
    for file in files:
        yield check_file(file, _label(file, root))


def _label(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _no_way_out(root: Path) -> str:
    found = list(root.rglob("*"))
    for path in found:
        within(root, path.relative_to(root).as_posix(), f"the folder '{root}'")
    return f"{len(found)} names, none leads out of the folder"


def _exported(path: Path) -> Path | None:
    """The exported file that a name stands for: its own, or that of its manifest, also where the file is gone."""
    if path.suffix == ".json":
        path = path.with_suffix("")
        return path if path.suffix in _EXPORTED else None
    return path if path.suffix in _EXPORTED or (path.is_file() and manifest_path(path).is_file()) else None
