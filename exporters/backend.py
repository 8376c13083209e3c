"""What runs the two graphs of a decoder, and the one for the CPU: ONNX Runtime on arrays of ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnxruntime

from modpass.exporters.decoder_manifest import CacheEntry, DecoderManifest
from modpass.exporters.onnx_session import open_session, ports, type_of

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
        step, first = (open_session(folder / n, manifest.dtype, self.threads) for n in ("decode.onnx", "prefill.onnx"))
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
        for cache in self.manifest.caches:
            self._write(cache, position, live)
        total = 0
        for block in self.manifest.routing:
            count = self.arrays[block.count]
            taken = (self.new[f"{block.count}.new"] > count) & live
            total += int(taken.sum())
            for cache in block.caches:
                self._write(cache, count, taken)
            self.arrays[block.places][taken, count[taken]] = position[taken]
            count[taken] += 1
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
        self.step_binding.bind({n: self.arrays[n] for n in pairs}, {o: self.new[o] for o in pairs.values()})

    def _write(self, cache: CacheEntry, place: np.ndarray, rows: np.ndarray) -> None:
        """Put the new rows where they belong; a cache may have several entries a row, one for each head."""
        whole, new = self.arrays[cache.name], self.new[f"{cache.name}.new"]
        each = whole.shape[0] // len(place)
        moved, fresh = np.moveaxis(whole, cache.dim, 1), np.moveaxis(new, cache.dim, 1)
        for row in np.flatnonzero(rows):
            part = slice(row * each, (row + 1) * each)
            moved[part, place[row]] = fresh[part, 0]


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
