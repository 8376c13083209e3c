"""What runs the two graphs of a decoder, and the one for the CPU: ONNX Runtime on arrays of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnxruntime

from modpass.exporters.decoder_manifest import CacheEntry, DecoderManifest
from modpass.exporters.onnx_session import open_session, ports, refuse_bfloat16, type_of

__all__ = ["Backend", "OnnxRuntimeBackend", "Stepped"]


class Array(Protocol):
    """What the caches are made of: of numpy or of torch."""

    @property
    def nbytes(self) -> int:
        """Its size in memory."""


class Stepped(NamedTuple):
    """What a step returns: logits ``[B, V]``, valid until the next call, and how many (live row, routed block) ran."""

    logits: np.ndarray
    taken: int


class Backend(Protocol):
    """Runs prefill and steps over caches and routing state that are allocated once, ``arrays`` by name."""

    @property
    def arrays(self) -> Mapping[str, Array]:
        """Caches and routing state."""

    def open(self, folder: Path, manifest: DecoderManifest) -> None:
        """Load the graphs of a folder."""

    def prefill(self, ids: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Fill ``arrays`` from prompts ``[B, S]``; returns logits ``[B, V]`` of each row's last token."""

    def step(self, tokens: np.ndarray, position: np.ndarray, live: np.ndarray) -> Stepped:
        """Run one token a row, ``[B]``, and write what it leaves in ``arrays``; rows not ``live`` leave nothing."""


class OnnxRuntimeBackend:
    """ONNX Runtime on the CPU. Prefill writes straight into the caches that steps read.

    threads: processor threads of an operator; None leaves it to ONNX Runtime.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads
        self.arrays: dict[str, np.ndarray] = {}
        self.new: dict[str, np.ndarray] = {}

    def open(self, folder: Path, manifest: DecoderManifest) -> None:
        """Open a session for each graph and bind its inputs and outputs.

        Raises:
            ExportError: ONNX Runtime refuses a file.
            StateError: the graphs lack what the manifest names.
        """
        self.manifest = manifest
        refuse_bfloat16(folder / "decode.onnx", manifest.dtype)
        step, first = (open_session(folder / f"{n}.onnx", threads=self.threads) for n in ("decode", "prefill"))
        manifest.match(ports(step), ports(first))
        inputs = {i.name: _zeros(i) for i in step.get_inputs()}
        self.new = {o.name: _zeros(o) for o in step.get_outputs()}
        prompt = {i.name: _zeros(i) for i in first.get_inputs()}
        self.fed = {n: inputs[n] for n in (manifest.tokens, "position", "live") if n in inputs}
        self.arrays = {n: a for n, a in inputs.items() if n not in self.fed}
        self.step_binding = _Bound(step, inputs, self.new)
        self.ids, self.length = prompt[manifest.tokens], prompt["length"]
        self.first = {o.name: self.arrays[o.name] if o.name in self.arrays else _zeros(o) for o in first.get_outputs()}
        self.prefill_binding = _Bound(first, prompt, self.first)

    def prefill(self, ids: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Fill the caches; see ``Backend``."""
        self.ids[:], self.length[:] = ids, length
        self.prefill_binding.run()
        logits: np.ndarray = self.first[self.manifest.logits][:, 0]
        return logits

    def step(self, tokens: np.ndarray, position: np.ndarray, live: np.ndarray) -> Stepped:
        """One token a row; see ``Backend``."""
        logits = self.compute(tokens, position, live)
        whole, *routed = self._rows
        _write(whole, np.flatnonzero(live), position)
        for kept, new in self._states:
            kept[live] = new[live]
        total = 0
        for block, rows in zip(self.manifest.routing, routed, strict=True):
            count = self.arrays[block.count]
            taken = np.flatnonzero((self.new[f"{block.count}.new"] > count) & live)
            if taken.size:
                _write(rows, taken, count)
                self.arrays[block.places][taken, count[taken]] = position[taken]
                count[taken] += 1
                total += taken.size
        return Stepped(logits, total)

    def compute(self, tokens: np.ndarray, position: np.ndarray, live: np.ndarray) -> np.ndarray:
        """Run the graph of a step alone: logits ``[B, V]``; ``new`` holds what it returns, by output name."""
        given = {self.manifest.tokens: tokens.reshape(-1, 1), "position": position, "live": live}
        for name, array in self.fed.items():
            array[:] = given[name]
        self.step_binding.run()
        logits: np.ndarray = self.new[self.manifest.logits][:, 0]
        return logits

    def swap(self, pairs: Mapping[str, str]) -> None:
        """Let the next step read as input what the last one wrote as output, by (input, output) names."""
        for name, output in pairs.items():
            self.arrays[name], self.new[output] = self.new[output], self.arrays[name]
        vars(self).pop("_rows", None)
        self.step_binding.bind({n: self.arrays[n] for n in pairs}, {o: self.new[o] for o in pairs.values()})

    @cached_property
    def _rows(self) -> list[list[_Row]]:
        """The caches of full length, then those of each routed block: views made once, as a step has many."""
        groups = [self.manifest.caches, *(r.caches for r in self.manifest.routing)]
        return [
            [_Row(c, self.arrays[c.name], self.new[f"{c.name}.new"], self.manifest.batch) for c in caches]
            for caches in groups
        ]

    @cached_property
    def _states(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """What is remembered beside caches, and what a step makes of it, as views ``[B, ..]``."""
        batch, names = self.manifest.batch, [s.name for s in self.manifest.states]
        pairs = ((self.arrays[n], self.new[f"{n}.new"]) for n in names)
        return [(old.reshape(batch, -1, copy=False), new.reshape(batch, -1, copy=False)) for old, new in pairs]


class _Row:
    """A cache and what a step adds to it, as views ``[B, entries, N, ..]`` and ``[B, entries, ..]``.

    A cache may have several entries a row, one for each head.
    """

    def __init__(self, cache: CacheEntry, whole: np.ndarray, new: np.ndarray, batch: int) -> None:
        each = whole.shape[0] // batch
        moved, fresh = np.moveaxis(whole, cache.dim, 1), np.moveaxis(new, cache.dim, 1)
        self.whole = moved.reshape(batch, each, *moved.shape[1:], copy=False)
        self.new = fresh.reshape(batch, each, *fresh.shape[1:], copy=False)[:, :, 0]


def _write(rows: Sequence[_Row], which: np.ndarray, places: np.ndarray) -> None:
    """Put the new rows where they belong."""
    for row in which.tolist():
        place = int(places[row])
        for cache in rows:
            cache.whole[row, :, place] = cache.new[row]


def _zeros(value: Any) -> np.ndarray:
    return np.zeros(value.shape, type_of(value))


class _Bound:
    """A session whose inputs and outputs are arrays of ours, by address."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        inputs: Mapping[str, np.ndarray],
        outputs: Mapping[str, np.ndarray],
    ) -> None:
        self.session = session
        self.binding = session.io_binding()
        self.held: dict[str, np.ndarray] = {}
        self.bind(inputs, outputs)

    def bind(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
        """Bind arrays, in the place of those of the same names before."""
        self.held |= {**inputs, **outputs}
        for name, array in inputs.items():
            self.binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            self.binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def run(self) -> None:
        """Run once over what the arrays hold now."""
        self.session.run_with_iobinding(self.binding)
