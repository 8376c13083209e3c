"""A family of graphs of fixed shapes: which there are, what they take, and how a request may be padded to fit one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modpass.errors import StateError, VerificationError
from modpass.exporters.manifest import read_digest
from modpass.exporters.reader import Reader
from modpass.exporters.sealed import read_sealed, write_sealed
from modpass.exporters.within import within

__all__ = ["FILE", "Bucket", "BucketManifest", "Mask", "Padding", "Port", "check_files", "label"]

FILE, SCHEMA = "buckets.json", 1
Dim = int | str | None


@dataclass(frozen=True)
class Bucket:
    """One graph: its batch rows, its tokens (None where these follow from other sizes), its file in the folder."""

    batch: int
    sequence: int | None
    file: str

    @property
    def label(self) -> str:
        """``"8x1024"``, or ``"8"``."""
        return label(self.batch, self.sequence)

    @property
    def size(self) -> tuple[int, int]:
        """What makes one bucket smaller than another: its tokens, then its length."""
        return self.batch * (self.sequence or 1), self.sequence or 1


@dataclass(frozen=True)
class Port:
    """An input or output: dims are numbers, ``"batch"``, ``"sequence"``, or None where they follow otherwise."""

    name: str
    dims: tuple[Dim, ...]
    dtype: str

    def shape(self, bucket: Bucket) -> tuple[int | None, ...]:
        """Its shape in a bucket; None for a size that is not known here.

        >>> Port("ids", ("batch", "sequence"), "int64").shape(Bucket(1, 256, "1x256.onnx"))
        (1, 256)
        """
        sizes = {"batch": bucket.batch, "sequence": bucket.sequence}
        return tuple(sizes[d] if isinstance(d, str) else d for d in self.dims)


@dataclass(frozen=True)
class Mask:
    """The input that tells real tokens from padding, and its value (1 or 0) at real ones."""

    name: str
    real: int


@dataclass(frozen=True)
class Padding:
    """How a request may be padded without a change of its result, as tried at export.

    sequence: the side on which tokens may be put, "right" or "left", or None; batch: whether rows may be added;
    why: the reason where one of the two may not.
    """

    sequence: str | None
    batch: bool
    why: str = ""


@dataclass(frozen=True)
class BucketManifest:
    """The facts about one folder of buckets; files: the SHA-256 of each graph and of the weights, by path."""

    dtype: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    mask: Mask | None
    padding: Padding
    buckets: tuple[Bucket, ...]
    files: Mapping[str, str]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``buckets.json``."""
        write_sealed(Path(folder, FILE), SCHEMA, asdict(self))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> BucketManifest:
        """Read it back.

        Raises:
            StateError: there is none, or it is not one that this modpass reads.

        >>> BucketManifest.load("nowhere")
        Traceback (most recent call last):
        modpass.errors.StateError: there is no manifest 'nowhere/buckets.json'; so 'nowhere' is no folder ...
        """
        path = Path(folder, FILE)
        writers = "'modpass export --buckets' and modpass.exporters.export_buckets write one"
        missing = f"so '{folder}' is no folder of buckets; {writers}"
        return _Reader(str(path)).manifest(read_sealed(path, SCHEMA, missing, "export the model again"))

    def check(self, folder: str | os.PathLike[str]) -> None:
        """Hash every file again.

        Raises:
            VerificationError: a file is missing or has changed.
        """
        check_files(Path(folder), self.files, FILE)


def check_files(folder: Path, files: Mapping[str, str], said_by: str) -> None:
    """Hash the files that the manifest ``said_by`` of a folder names.

    Raises:
        VerificationError: a file is missing, has changed, or lies outside.
    """
    for name, digest in files.items():
        path = within(folder, name, f"'{folder / said_by}'")
        if not path.is_file():
            raise VerificationError(f"'{path}' is missing; export the model again")
        if read_digest(path) != digest:
            raise VerificationError(f"'{path}' is not the file that was exported; export the model again")


def label(batch: int, sequence: int | None) -> str:
    """The name of a bucket.

    >>> label(8, 1024), label(8, None)
    ('8x1024', '8')
    """
    return str(batch) if sequence is None else f"{batch}x{sequence}"


class _Reader(Reader):
    """Turns parsed JSON into a ``BucketManifest``."""

    def manifest(self, raw: dict[str, Any]) -> BucketManifest:
        raw = dict(raw)
        for name, read in (("inputs", self.port), ("outputs", self.port), ("buckets", self.bucket)):
            items = self.typed(raw.get(name), list, name)
            raw[name] = tuple(read(item, f"{name}[{i}]") for i, item in enumerate(items))
        if raw.get("mask") is not None:
            raw["mask"] = self.build(Mask, raw["mask"], "mask", name=str, real=int)
        raw["padding"] = self.padding(raw.get("padding"))
        found: BucketManifest = self.build(BucketManifest, raw, "", dtype=str, files=dict)
        for name, digest in found.files.items():
            self.typed(digest, str, f"files['{name}']")
        for bucket in found.buckets:
            if bucket.file not in found.files:
                raise StateError(
                    f"the manifest '{self.path}' does not vouch for '{bucket.file}'; export the model again"
                )
        if not found.buckets:
            raise StateError(f"the manifest '{self.path}' lists no bucket; export the model again")
        if found.mask is not None and (
            found.mask.name not in {p.name for p in found.inputs} or found.mask.real not in (0, 1)
        ):
            raise StateError(f"the manifest '{self.path}': the mask '{found.mask.name}' is no input, or not of 0 and 1")
        return found

    def port(self, raw: Any, where: str) -> Port:
        dims = self.typed(self.typed(raw, dict, where).get("dims"), list, f"{where}.dims")
        for dim in dims:
            if dim not in ("batch", "sequence", None):
                self.count(dim, f"{where}.dims")
        port: Port = self.build(Port, {**raw, "dims": tuple(dims)}, where, name=str, dtype=str)
        return port

    def bucket(self, raw: Any, where: str) -> Bucket:
        found: Bucket = self.build(Bucket, raw, where, batch=int, sequence=(int, type(None)), file=str)
        self.count(found.batch, f"{where}.batch")
        if found.sequence is not None:
            self.count(found.sequence, f"{where}.sequence")
        return found

    def padding(self, raw: Any) -> Padding:
        found: Padding = self.build(Padding, raw, "padding", sequence=(str, type(None)), batch=bool, why=str)
        if found.sequence not in ("right", "left", None):
            raise StateError(
                f"the manifest '{self.path}': 'padding.sequence' is '{found.sequence}', allowed are 'right', 'left' "
                f"and null"
            )
        return found
