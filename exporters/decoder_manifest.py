"""What a decoder folder holds: sizes, caches, routing state, and the SHA-256 of each file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

from modpass.decode.block import Skipping
from modpass.errors import StateError, VerificationError
from modpass.exporters.manifest import read_digest
from modpass.exporters.reader import Reader
from modpass.exporters.sealed import read_sealed, write_sealed
from modpass.exporters.within import within

__all__ = ["FILE", "TOKENIZER", "CacheEntry", "DecoderManifest", "Ports", "RoutingEntry", "StateEntry"]

FILE, SCHEMA = "decoder.json", 3
FILES = ("prefill.onnx", "decode.onnx", "weights.bin")
TOKENIZER = "tokenizer"


class Ports(NamedTuple):
    """The shapes of a graph's inputs and outputs, by name."""

    inputs: Mapping[str, tuple[int, ...]]
    outputs: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class StateEntry:
    """What is remembered of the last tokens outside attention: its name in the graphs, and its shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class CacheEntry(StateEntry):
    """A cache: its name in the graphs, its shape, and the dim that counts slots."""

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
    prefill graph reads at once; vocabulary: how many ids there are; dtype: of the weights; skipping: what a routed
    block does for a row that passes it by.
    """

    batch: int
    prompt: int
    max_sequence: int
    vocabulary: int
    dtype: str
    skipping: str
    tokens: str
    logits: str
    caches: tuple[CacheEntry, ...]
    routing: tuple[RoutingEntry, ...]
    files: Mapping[str, str]
    states: tuple[StateEntry, ...] = ()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``decoder.json``."""
        write_sealed(Path(folder, FILE), SCHEMA, asdict(self))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> DecoderManifest:
        """Read it back.

        Raises:
            StateError: there is none, or it is not one that this modpass reads.
        """
        path = Path(folder, FILE)
        writers = "'modpass export-decoder' and modpass.exporters.export_decoder write one"
        missing = f"so '{folder}' is no decoder folder; {writers}"
        return _Reader(str(path)).manifest(read_sealed(path, SCHEMA, missing, "export the model again"))

    def check(self, folder: str | os.PathLike[str], part: str = "") -> None:
        """Hash every file again; ``part`` is what the names of those to hash begin with.

        Raises:
            VerificationError: a file is missing, has changed, or lies in the tokenizer's folder without being vouched
                for.
        """
        root, said_by = Path(folder), f"'{Path(folder, FILE)}'"
        missing = [n for n in FILES if n not in self.files]
        if missing:
            raise VerificationError(f"{said_by} does not vouch for '{missing[0]}'; export the model again")
        for name, digest in self.files.items():
            if not name.startswith(part):
                continue
            path = within(root, name, said_by)
            if not path.is_file():
                raise VerificationError(f"'{path}' is missing; export the model again")
            if read_digest(path) != digest:
                raise VerificationError(f"'{path}' is not the file that was exported; export the model again")
        for path in sorted(Path(root, TOKENIZER).rglob("*")):
            if path.is_file() and path.relative_to(root).as_posix() not in self.files:
                raise VerificationError(
                    f"{said_by} does not vouch for '{path}', which a tokenizer would read; remove it, or export again"
                )

    def all_caches(self) -> Iterator[CacheEntry]:
        """The dense caches, then each routed block's."""
        yield from self.caches
        for block in self.routing:
            yield from block.caches

    def match(self, step: Ports, first: Ports) -> None:
        """Compare with what the decode and the prefill graph take and return.

        Raises:
            StateError: they have no such name, or another shape.
        """
        state = {v.name: v.shape for v in (*self.all_caches(), *self.states)}
        new = [f"{n}.new" for n in (*state, *(r.count for r in self.routing))]
        for block in self.routing:
            state |= {block.count: (self.batch,), block.places: (self.batch, block.slots)}
        given = {self.tokens: (self.batch, 1), "position": (self.batch,), **state}
        prompt = {self.tokens: (self.batch, self.prompt), "length": (self.batch,)}
        _same("decode", "takes", given, step.inputs)
        _same("decode", "returns", dict.fromkeys([self.logits, *new]), step.outputs)
        _same("prefill", "takes", prompt, first.inputs)
        _same("prefill", "returns", {self.logits: None, **state}, first.outputs)


def _same(graph: str, verb: str, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for name, shape in wanted.items():
        if name not in found:
            raise StateError(f"{FILE} says that the {graph} graph {verb} '{name}', but it does not; export again")
        if shape is not None and tuple(found[name]) != shape:
            raise StateError(
                f"{FILE} says that '{name}' of the {graph} graph is {list(shape)}, but it is {list(found[name])}; "
                f"export again"
            )


class _Reader(Reader):
    """Turns parsed JSON into a ``DecoderManifest``."""

    def manifest(self, raw: dict[str, Any]) -> DecoderManifest:
        raw = dict(raw)
        for name in ("batch", "prompt", "max_sequence", "vocabulary"):
            if name in raw:
                self.count(raw[name], name)
        for name, read in (("caches", self.cache), ("states", self.state), ("routing", self.routing)):
            if name in raw:
                items = self.typed(raw[name], list, name)
                raw[name] = tuple(read(item, f"{name}[{i}]") for i, item in enumerate(items))
        found: DecoderManifest = self.build(
            DecoderManifest, raw, "", dtype=str, skipping=str, tokens=str, logits=str, files=dict
        )
        for name, digest in found.files.items():
            self.typed(digest, str, f"files['{name}']")
        if found.skipping not in get_args(Skipping):
            raise StateError(
                f"the manifest '{self.path}': 'skipping' is '{found.skipping}', allowed are "
                f"{', '.join(map(repr, get_args(Skipping)))}"
            )
        return found

    def cache(self, raw: Any, where: str) -> CacheEntry:
        shape = self.counts(self.typed(raw, dict, where).get("shape"), f"{where}.shape")
        found: CacheEntry = self.build(CacheEntry, {**raw, "shape": shape}, where, name=str, dim=int)
        if not 0 < found.dim < len(shape):
            raise StateError(f"the manifest '{self.path}': '{where}.dim' is {found.dim}, no dim behind the first")
        return found

    def state(self, raw: Any, where: str) -> StateEntry:
        shape = self.counts(self.typed(raw, dict, where).get("shape"), f"{where}.shape")
        found: StateEntry = self.build(StateEntry, {**raw, "shape": shape}, where, name=str)
        return found

    def routing(self, raw: Any, where: str) -> RoutingEntry:
        items = self.typed(self.typed(raw, dict, where).get("caches"), list, f"{where}.caches")
        self.count(raw.get("slots"), f"{where}.slots")
        caches = tuple(self.cache(item, f"{where}.caches[{i}]") for i, item in enumerate(items))
        found: RoutingEntry = self.build(
            RoutingEntry, {**raw, "caches": caches}, where, block=str, count=str, places=str
        )
        return found
