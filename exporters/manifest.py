"""What was exported, in a plain JSON file beside it: shapes, routed blocks, versions, SHA-256."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from modpass.errors import StateError, VerificationError
from modpass.exporters.reader import Reader
from modpass.files import sha256, whole_file
from modpass.version import __version__

__all__ = ["SCHEMA", "DataFile", "Manifest", "RoutedSpec", "TensorSpec", "manifest_path", "versions"]

SCHEMA = 1

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
    """The external-data file of an ONNX file; it lies in the same folder."""

    file: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The facts about one exported file (``kind`` is ``"onnx"`` or ``"engine"``).

    ``bytes`` is the size of an engine, ``build_seconds`` how long TensorRT took; both are None for ONNX.

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
    flavor: str | None = None
    compute_capability: str | None = None
    onnx_sha256: str | None = None
    build_seconds: float | None = None
    bytes: int | None = None

    def save(self, path: Path_) -> None:
        """Write the manifest as JSON, whole or not at all.

        Raises:
            StateError: a setting or parity figure cannot be written as JSON.

        >>> import tempfile; path = Path(tempfile.mkdtemp(), "m.onnx.json")
        >>> m = Manifest("onnx", "m.onnx", "00", 18, "float32"); m.save(path); Manifest.load(path) == m
        True
        """
        try:
            text = json.dumps({"schema": SCHEMA, **_without_unset(asdict(self))}, indent=2, allow_nan=False)
        except (TypeError, ValueError) as e:
            raise StateError(f"the manifest '{path}' cannot be written as JSON: {e}") from e
        with whole_file(path) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path_) -> Manifest:
        """Read a manifest back.

        Raises:
            StateError: no such file, not JSON, another schema version, or a field of a wrong type.
        """
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as e:
            raise StateError(f"there is no manifest '{path}'; export_onnx and build_engine write it") from e
        except (OSError, ValueError) as e:
            raise StateError(f"the manifest '{path}' cannot be read: {e}") from e
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            found = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
            raise StateError(
                f"the manifest '{path}' has schema {found!r}, this modpass ({__version__}) reads "
                f"schema {SCHEMA}; export the model again"
            )
        return _Reader(str(path)).manifest({k: v for k, v in raw.items() if k != "schema"})

    def check(self, file: Path_) -> None:
        """Hash ``file`` (and its external-data file) again and compare.

        Raises:
            VerificationError: a file is missing, or is not the one this manifest was written for.
        """
        _same(Path(file), self.sha256)
        if self.data is not None:
            _same(Path(file).parent / self.data.file, self.data.sha256)


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
    try:
        found = sha256(file)
    except OSError as e:
        raise VerificationError(f"'{file}', which its manifest names, cannot be read: {e}") from e
    if found != expected:
        raise VerificationError(
            f"'{file}' is not the file its manifest was written for: SHA-256 is {found[:16]}..., "
            f"the manifest says {expected[:16]}...; export it again"
        )


def _without_unset(facts: dict[str, Any]) -> dict[str, Any]:
    """Engine facts have no place in the manifest of an ONNX file, nor has a data file that does not exist."""
    optional = {"data", "flavor", "compute_capability", "onnx_sha256", "build_seconds", "bytes"}
    return {k: v for k, v in facts.items() if v is not None or k not in optional}


class _Reader(Reader):
    """Turns parsed JSON into a ``Manifest``."""

    def manifest(self, raw: dict[str, Any]) -> Manifest:
        raw = dict(raw)
        for name in ("inputs", "outputs"):
            items = self.typed(raw.get(name, []), list, name)
            raw[name] = tuple(self.tensor(item, f"{name}[{i}]") for i, item in enumerate(items))
        blocks = self.typed(raw.get("routed_blocks", {}), dict, "routed_blocks")
        raw["routed_blocks"] = {n: self.routed(b, f"routed_blocks['{n}']") for n, b in blocks.items()}
        if raw.get("data") is not None:
            raw["data"] = self.build(DataFile, raw["data"], "data", file=str, sha256=str)
            if Path(raw["data"].file).name != raw["data"].file:
                raise StateError(f"the manifest '{self.path}': data.file must be a plain file name")
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
            flavor=_TEXT_OR_NONE,
            compute_capability=_TEXT_OR_NONE,
            onnx_sha256=_TEXT_OR_NONE,
            build_seconds=(*_NUMBER, type(None)),
            bytes=(int, type(None)),
        )
        if manifest.kind not in ("onnx", "engine"):
            raise StateError(f"the manifest '{self.path}': kind is '{manifest.kind}', allowed are 'onnx' and 'engine'")
        return manifest

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
