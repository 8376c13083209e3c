"""Generate text from an exported decoder: prefill once, then step, caches written in place."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from modpass.exporters.backend import Backend, OnnxRuntimeBackend
from modpass.exporters.backends import backend_named
from modpass.exporters.decoder_manifest import DecoderManifest
from modpass.exporters.request import Stream, check_request
from modpass.exporters.sampling import Sampler

__all__ = ["DecoderSession", "Generation", "Statistics"]


@dataclass
class Statistics:
    """What a generation cost: seconds, tokens, how often routed blocks were passed by, bytes of caches."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    decisions: int = 0
    skipped: int = 0
    cache_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows by the time of the decode steps."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def skipped_share(self) -> float:
        """The share of (row, step, routed block) that was passed by; 0 where no block is routed."""
        return self.skipped / self.decisions if self.decisions else 0.0


@dataclass(frozen=True)
class Generation:
    """The new tokens of each prompt, and what they cost."""

    tokens: list[list[int]]
    statistics: Statistics = field(repr=False)


class DecoderSession:
    """Runs the two graphs of a folder that ``export_decoder`` wrote.

    Caches are allocated once. The graphs read them where they lie and return new rows alone, which are written in
    place; a routed block's cache holds only the tokens that took part.

    Args:
        directory: the folder; its files are hashed before they are loaded.
        backend: what runs the graphs, or the name of it (``BACKENDS``); ONNX Runtime on the CPU by default.

    Raises:
        StateError: it is no such folder.
        InputError: there is no such backend, or no GPU for it.
        MissingExtraError: the backend needs a package that is not installed.
        VerificationError: a file is missing or is not the one that was exported.

    >>> import tempfile
    >>> from modpass.decode.example import tiny_decoder
    >>> from modpass.exporters.decoder import export_decoder
    >>> folder = tempfile.mkdtemp() + "/d"
    >>> _ = export_decoder(tiny_decoder(), folder, prompt=4, max_sequence=8)
    >>> len(DecoderSession(folder).generate([[1, 2]], max_new_tokens=3).tokens[0])
    3
    """

    def __init__(self, directory: str | os.PathLike[str], backend: Backend | str | None = None) -> None:
        folder = Path(directory)
        self.manifest = DecoderManifest.load(folder)
        self.backend = backend_named(backend) if isinstance(backend, str) else backend or OnnxRuntimeBackend()
        self.manifest.check(folder)
        self.backend.open(folder, self.manifest)

    @property
    def cache_bytes(self) -> int:
        """The memory of all caches, and of what is remembered beside them."""
        kept = (*self.manifest.all_caches(), *self.manifest.states)
        return sum(self.backend.arrays[v.name].nbytes for v in kept)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[int] = (),
        stream: Stream | None = None,
    ) -> Generation:
        """Continue each prompt.

        Args:
            prompts: token ids, up to ``batch`` rows of any length.
            max_new_tokens: at most so many each.
            temperature: 0 takes the likeliest token; above, tokens are drawn.
            top_k, top_p: draw among the k likeliest, or the likeliest that hold this much probability.
            seed: makes draws repeatable.
            stop: a row ends with any of these ids.
            stream: is called with (row, token) as tokens come.

        Raises:
            InputError: an argument of a wrong type or value; no prompt, too many, an empty one, one with ids that the
                model does not have, or one that leaves no room in the caches.
        """
        sampler = Sampler(temperature, top_k, top_p, seed)
        check_request(self.manifest, prompts, max_new_tokens, stop, stream)
        last = set(stop)
        statistics = Statistics(cache_bytes=self.cache_bytes)
        rows = [list(p) for p in prompts]
        logits, position = self._read(rows, statistics)
        made: list[list[int]] = [[] for _ in rows]
        done = [False] * len(rows)
        started = time.perf_counter()
        for step in range(max_new_tokens):
            chosen = sampler(logits[: len(rows)])
            for row, token in enumerate(map(int, chosen)):
                if not done[row]:
                    made[row].append(token)
                    statistics.tokens += 1
                    if stream is not None:
                        stream(row, token)
                    done[row] = token in last
            if all(done) or step == max_new_tokens - 1 or int(position.max()) >= self.manifest.max_sequence:
                break
            logits = self.step(np.resize(chosen, self.manifest.batch), position, statistics, ~np.array(done))
            position += 1
        statistics.decode_seconds = time.perf_counter() - started
        return Generation(made, statistics)

    def _read(self, rows: list[list[int]], statistics: Statistics) -> tuple[np.ndarray, np.ndarray]:
        """Prefill with the beginning of each prompt, step through what is left over."""
        started = time.perf_counter()
        limit, batch = self.manifest.prompt, self.manifest.batch
        ids = np.zeros((batch, limit), np.int64)
        filled = [rows[i % len(rows)] for i in range(batch)]
        length = np.array([min(len(r), limit) for r in filled], np.int64)
        for i, row in enumerate(filled):
            ids[i, : length[i]] = row[: length[i]]
        logits = self.backend.prefill(ids, length)[:, : self.manifest.vocabulary]
        position = length.copy()
        longest = max(len(r) for r in filled)
        kept = logits.copy()
        for _ in range(longest - limit):
            active = np.array([position[i] < len(r) for i, r in enumerate(filled)])
            tokens = np.array([r[min(int(position[i]), len(r) - 1)] for i, r in enumerate(filled)], np.int64)
            fresh = self.step(tokens, position, Statistics(), active)
            kept[active] = fresh[active]
            position += active
        statistics.prefill_seconds = time.perf_counter() - started
        return kept, position

    def step(self, tokens: np.ndarray, position: np.ndarray, statistics: Statistics, active: np.ndarray) -> np.ndarray:
        """One token a row; rows that are not active leave no trace in the caches."""
        live = np.zeros(self.manifest.batch, bool)
        live[: len(active)] = active
        at = np.minimum(position, self.manifest.max_sequence - 1)
        logits, taken = self.backend.step(tokens, at, live)
        decisions = int(live.sum()) * len(self.manifest.routing)
        statistics.decisions += decisions
        statistics.skipped += decisions - taken
        statistics.steps += 1
        return logits[:, : self.manifest.vocabulary]
