"""What a decoder folder holds: sizes, caches, routing state, and the SHA-256 of each file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modpass.decode import Cache, PrefillModel, Routing, StepModel
from modpass.errors import StateError, VerificationError
from modpass.files import sha256, whole_file

__all__ = ["FILE", "CacheEntry", "DecoderManifest", "RoutingEntry", "describe"]

FILE, SCHEMA = "decoder.json", 1
FILES = ("prefill.onnx", "decode.onnx", "weights.bin")


@dataclass(frozen=True)
class CacheEntry:
    """A cache: its name in the graphs, its shape, and the dim that counts slots."""

    name: str
    shape: tuple[int, ...]
    dim: int


@dataclass(frozen=True)
class RoutingEntry:
    """A routed block: its slots, the names of its state, and its caches."""

    block: str
    slots: int
    count: str
    places: str
    caches: tuple[CacheEntry, ...]


@dataclass(frozen=True)
class DecoderManifest:
    """The facts about one decoder folder.

    tokens: the input for token ids; logits: the output with scores over the vocabulary; prompt: tokens that the
    prefill graph reads at once; skipping: what a routed block does for a row that passes it by.
    """

    batch: int
    prompt: int
    max_sequence: int
    skipping: str
    tokens: str
    logits: str
    caches: tuple[CacheEntry, ...]
    routing: tuple[RoutingEntry, ...]
    files: Mapping[str, str]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``decoder.json``."""
        with whole_file(Path(folder, FILE)) as temporary:
            temporary.write_text(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> DecoderManifest:
        """Read it back.

        Raises:
            StateError: there is none, or it is not one that this modpass reads.
        """
        path = Path(folder, FILE)
        try:
            raw: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError as e:
            raise StateError(f"there is no '{path}'; modpass.exporters.export_decoder writes such a folder") from e
        except (OSError, ValueError) as e:
            raise StateError(f"'{path}' cannot be read: {e}") from e
        if not isinstance(raw, dict) or raw.pop("schema", None) != SCHEMA:
            raise StateError(f"'{path}' has another schema than {SCHEMA}; export the model again")
        try:
            caches = tuple(map(_cache, raw.pop("caches")))
            routing = tuple(
                RoutingEntry(**{**r, "caches": tuple(map(_cache, r["caches"]))}) for r in raw.pop("routing")
            )
            return cls(**raw, caches=caches, routing=routing)
        except (KeyError, TypeError) as e:
            raise StateError(f"'{path}' is not complete: {e}; export the model again") from e

    def check(self, folder: str | os.PathLike[str]) -> None:
        """Hash every file again.

        Raises:
            VerificationError: a file is missing or has changed.
        """
        missing = [n for n in FILES if n not in self.files]
        if missing:
            raise VerificationError(f"'{Path(folder, FILE)}' does not vouch for '{missing[0]}'; export the model again")
        for name, digest in self.files.items():
            path = Path(folder, name)
            if Path(name).name != name or not path.is_file():
                raise VerificationError(f"'{path}' is missing; export the model again")
            if sha256(path) != digest:
                raise VerificationError(f"'{path}' is not the file that was exported; export the model again")


def _cache(raw: Mapping[str, Any]) -> CacheEntry:
    return CacheEntry(raw["name"], tuple(raw["shape"]), raw["dim"])


def describe(
    first: PrefillModel, step: StepModel, prompt: int, skipping: str, files: Mapping[str, str]
) -> DecoderManifest:
    """The manifest of two derived graphs."""

    def entry(cache: Cache) -> CacheEntry:
        return CacheEntry(cache.name, cache.shape, cache.dim)

    def routing(r: Routing) -> RoutingEntry:
        return RoutingEntry(r.block, r.slots, r.count, r.places, tuple(map(entry, r.caches)))

    info = step.info
    return DecoderManifest(
        info.batch,
        prompt,
        info.max_sequence,
        skipping,
        info.tokens[0].name,
        "logits" if "logits" in info.model_outputs else info.model_outputs[0],
        tuple(map(entry, info.dense_caches)),
        tuple(map(routing, info.routing)),
        files,
    )
