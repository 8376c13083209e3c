"""What was exported, in a plain JSON file beside it: shapes, routed blocks, versions, SHA-256."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from modpass.errors import StateError, VerificationError
from modpass.exporters.reader import Reader
from modpass.exporters.sealed import read_sealed, write_sealed
from modpass.exporters.within import within
from modpass.files import sha256
from modpass.version import __version__

__all__ = ["SCHEMA", "DataFile", "Manifest", "RoutedSpec", "TensorSpec", "manifest_path", "read_digest", "versions"]

SCHEMA = 2
_AGAIN = "export the model again"

Path_ = str | os.PathLike[str]
_NUMBER = (int, float)
_TEXT_OR_NONE = (str, type(None))


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of an exported file: name, integer shape, dtype (``"int64"``, ``"float16"``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class RoutedSpec:
    """One routed block as exported: ``k`` of ``sequence`` tokens; the ONNX value ``indices`` says which.

    ``selector`` is how expert choice finds them: "topk", or "bisection" where k is above TensorRT's limit.
    """

    capacity: float
    sequence: int
    k: int
    gate: str
    selection: str
    indices: str | None = None
    selector: str | None = None


@dataclass(frozen=True)
class DataFile:
    """A file in the folder of an exported one: its weights, or the probe that it is run on again."""

    file: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The facts about one exported file (``kind`` is ``"onnx"`` or ``"engine"``).

    ``bytes`` is the size of an engine, ``build_seconds`` how long TensorRT took; both are None for ONNX. ``stripped``:
    the engine holds no weights. ``probe`` holds what the model computes from inputs of a seed. ``weights``: in which
    few bits they are ("int8"; None: as ``dtype`` says); ``max_error``: the relative error that was allowed;
    ``islands``: what measurement kept in float32.

    >>> Manifest("onnx", "m.onnx", "00", 18, "float32").routed_blocks
    {}
    """

    kind: str
    file: str
    sha256: str
    opset: int
    dtype: str
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    shape: Mapping[str, Any] = field(default_factory=dict)
    routed_blocks: Mapping[str, RoutedSpec] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    parity: Mapping[str, Any] | None = None
    data: DataFile | None = None
    probe: DataFile | None = None
    weights: str | None = None
    max_error: float | None = None
    islands: tuple[str, ...] = ()
    flavor: str | None = None
    compute_capabilities: tuple[str, ...] = ()
    stripped: bool = False
    onnx_sha256: str | None = None
    build_seconds: float | None = None
    bytes: int | None = None

    @property
    def precision(self) -> str:
        """What the file computes with: its weights where they have few bits, else its dtype.

        >>> Manifest("onnx", "m.onnx", "00", 21, "float16", weights="int4").precision
        'int4'
        """
        return self.weights or self.dtype

    def save(self, path: Path_) -> None:
        """Write the manifest as JSON, whole or not at all.

        Raises:
            StateError: a setting or parity figure cannot be written as JSON.

        >>> import tempfile; path = Path(tempfile.mkdtemp(), "m.onnx.json")
        >>> m = Manifest("onnx", "m.onnx", "00", 18, "float32"); m.save(path); Manifest.load(path) == m
        True
        """
        write_sealed(path, SCHEMA, _without_unset(asdict(self)))

    @classmethod
    def load(cls, path: Path_) -> Manifest:
        """Read a manifest back.

        Raises:
            StateError: no such file, not JSON, changed, of another schema, or a field of a wrong type.
        """
        raw = read_sealed(path, SCHEMA, "export_onnx and build_engine write it", _AGAIN)
        return _Reader(str(path)).manifest(raw)

    def check(self, file: Path_) -> None:
        """Hash ``file`` again, and the files that belong to it, and compare.

        Raises:
            VerificationError: a file is missing, or is not the one this manifest was written for.
        """
        _same(Path(file), self.sha256)
        for part in (self.data, self.probe):
            if part is not None:
                _same(within(Path(file).parent, part.file, f"'{manifest_path(file)}'"), part.sha256)


def manifest_path(file: Path_) -> Path:
    """Where the manifest of ``file`` lies.

    >>> manifest_path("model.onnx").name
    'model.onnx.json'
    """
    return Path(f"{os.fspath(file)}.json")


def versions(*modules: str) -> dict[str, str]:
    """Versions of modpass, torch, onnx, onnxruntime and of each further module that is installed.

    >>> sorted(versions())
    ['modpass', 'onnx', 'onnxruntime', 'torch']
    """
    found = {"modpass": __version__}
    for name in ("torch", "onnx", "onnxruntime", *modules):
        try:
            found[name] = str(importlib.import_module(name).__version__)
        except ImportError:
            continue
    return found


def _same(file: Path, expected: str) -> None:
    found = read_digest(file)
    if found != expected:
        raise VerificationError(
            f"'{file}' is not the file its manifest was written for: SHA-256 is {found[:16]}..., "
            f"the manifest says {expected[:16]}...; export it again"
        )


def read_digest(file: Path) -> str:
    """SHA-256 of a file that a manifest names.

    Raises:
        VerificationError: it cannot be read.
    """
    try:
        return sha256(file)
    except OSError as e:
        raise VerificationError(f"'{file}', which its manifest names, cannot be read: {e}") from e


def _without_unset(facts: dict[str, Any]) -> dict[str, Any]:
    """Engine facts have no place in the manifest of an ONNX file, nor has a data file that does not exist."""
    optional = {
        "data", "probe", "weights", "max_error", "islands", "flavor", "compute_capabilities", "stripped", "onnx_sha256",
        "build_seconds", "bytes",
    }  # fmt: skip
    return {k: v for k, v in facts.items() if v or k not in optional}


class _Reader(Reader):
    """Turns parsed JSON into a ``Manifest``."""

    def manifest(self, raw: dict[str, Any]) -> Manifest:
        raw = dict(raw)
        for name in ("inputs", "outputs"):
            items = self.typed(raw.get(name, []), list, name)
            raw[name] = tuple(self.tensor(item, f"{name}[{i}]") for i, item in enumerate(items))
        blocks = self.typed(raw.get("routed_blocks", {}), dict, "routed_blocks")
        raw["routed_blocks"] = {n: self.routed(b, f"routed_blocks['{n}']") for n, b in blocks.items()}
        for name in ("data", "probe"):
            if raw.get(name) is not None:
                raw[name] = self.part(raw[name], name)
        for name in {"compute_capabilities", "islands"} & raw.keys():
            raw[name] = tuple(self.typed(c, str, name) for c in self.typed(raw[name], list, name))
        manifest: Manifest = self.build(
            Manifest,
            raw,
            "",
            kind=str,
            file=str,
            sha256=str,
            opset=int,
            dtype=str,
            shape=dict,
            settings=dict,
            versions=dict,
            parity=(dict, type(None)),
            weights=_TEXT_OR_NONE,
            max_error=(*_NUMBER, type(None)),
            flavor=_TEXT_OR_NONE,
            stripped=bool,
            onnx_sha256=_TEXT_OR_NONE,
            build_seconds=(*_NUMBER, type(None)),
            bytes=(int, type(None)),
        )
        if manifest.kind not in ("onnx", "engine"):
            raise StateError(f"the manifest '{self.path}': kind is '{manifest.kind}', allowed are 'onnx' and 'engine'")
        return manifest

    def part(self, raw: Any, where: str) -> DataFile:
        found: DataFile = self.build(DataFile, raw, where, file=str, sha256=str)
        if Path(found.file).name != found.file:
            raise StateError(f"the manifest '{self.path}': {where}.file must be a plain file name")
        return found

    def tensor(self, raw: Any, where: str) -> TensorSpec:
        shape = self.typed(self.typed(raw, dict, where).get("shape"), list, f"{where}.shape")
        dims = tuple(self.typed(d, int, f"{where}.shape") for d in shape)
        spec: TensorSpec = self.build(TensorSpec, {**raw, "shape": dims}, where, name=str, dtype=str)
        return spec

    def routed(self, raw: Any, where: str) -> RoutedSpec:
        spec: RoutedSpec = self.build(
            RoutedSpec,
            raw,
            where,
            capacity=_NUMBER,
            sequence=int,
            k=int,
            gate=str,
            selection=str,
            indices=_TEXT_OR_NONE,
            selector=_TEXT_OR_NONE,
        )
        return spec
