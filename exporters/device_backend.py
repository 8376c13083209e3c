"""Prefill and steps on a device: caches stay there, only tokens go in and only logits come out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from modpass.errors import BuildError
from modpass.exporters.backend import Stepped
from modpass.exporters.decoder_manifest import DecoderManifest, Ports
from modpass.exporters.device import Call, Device, Layout
from modpass.exporters.settle import settle

__all__ = ["DeviceBackend", "Program"]


class Program(Protocol):
    """One graph, loaded on a device."""

    @property
    def inputs(self) -> Mapping[str, Layout]:
        """What it reads."""

    @property
    def outputs(self) -> Mapping[str, Layout]:
        """What it writes."""

    @property
    def uncapturable(self) -> str | None:
        """Why a CUDA graph cannot hold a run; None where it can."""

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Read and write these from now on, at their addresses."""

    def run(self) -> None:
        """Put one run on the device's stream."""


class DeviceBackend(ABC):
    """What backends for a GPU share; see ``Backend``.

    uncaptured: why a step is not one CUDA graph; None where it is.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.arrays: dict[str, Tensor] = {}
        self.new: dict[str, Tensor] = {}
        self.uncaptured: str | None = "nothing is open"

    @abstractmethod
    def load(self, folder: Path, name: str, manifest: DecoderManifest) -> Program:
        """Load the graph called ``name``, "prefill" or "decode"."""

    def open(self, folder: Path, manifest: DecoderManifest) -> None:
        """Load both graphs, allocate all memory, capture the step.

        Raises:
            ModpassError: a graph cannot be loaded, or is not the one of the manifest.
        """
        self.manifest = manifest
        with self.device.active():
            self.first, self.program = (self.load(folder, n, manifest) for n in ("prefill", "decode"))
            manifest.match(_ports(self.program), _ports(self.first))
            self._allocate()
            self._advance = self._captured()

    def _zeros(self, layouts: Mapping[str, Layout]) -> dict[str, Tensor]:
        return {name: self.device.zeros(*layout) for name, layout in layouts.items()}

    def _allocate(self) -> None:
        rows, logits = self.manifest.batch, self.manifest.logits
        given, self.new = self._zeros(self.program.inputs), self._zeros(self.program.outputs)
        self.program.bind({**given, **self.new})
        self.fed = {
            n: _Feed(self.device, given.pop(n)) for n in (self.manifest.tokens, "position", "live") if n in given
        }
        self.fed.setdefault("live", _Feed(self.device, self.device.zeros((rows,), torch.bool)))
        self.arrays = given
        prompt, filled = self._zeros(self.first.inputs), dict(given)
        filled |= self._zeros({n: layout for n, layout in self.first.outputs.items() if n not in given})
        self.first.bind({**{n: filled[n] for n in self.first.outputs}, **prompt})
        self.prompt = {n: _Feed(self.device, t) for n, t in prompt.items()}
        self.last, self.scores = filled[logits], self.new[logits]
        self.logits = self.device.host((rows, self.scores.shape[-1]), torch.float32)
        self.taken, self.taken_host = self.device.zeros((), torch.int64), self.device.host((), torch.int64)

    def _captured(self) -> Call:
        """One step, in as few CUDA graphs as can be; no row is live yet, so that the runs before leave no trace."""
        self.uncaptured = self.program.uncapturable if self.device.captures else "a CPU has no CUDA graphs"
        if self.uncaptured is None:
            try:
                return self.device.capture(self._run)
            except (RuntimeError, BuildError) as e:
                self.uncaptured = f"the capture failed: {e}"
        settled = self.device.capture(self._settle)

        def advance() -> None:
            self.program.run()
            settled()

        return advance

    def _run(self) -> None:
        self.program.run()
        self._settle()

    def _settle(self) -> None:
        position, live = self.fed["position"].target, self.fed["live"].target
        settle(self.manifest, self.arrays, self.new, position, live, self.taken)

    def prefill(self, ids: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Fill the caches; see ``Backend``."""
        with self.device.active():
            self.prompt[self.manifest.tokens](ids)
            self.prompt["length"](length)
            self.first.run()
            self.logits.copy_(self.last[:, 0], non_blocking=True)
        return self.logits.numpy()

    def step(self, tokens: np.ndarray, position: np.ndarray, live: np.ndarray) -> Stepped:
        """One token a row; see ``Backend``."""
        with self.device.active():
            given = {self.manifest.tokens: tokens.reshape(-1, 1), "position": position, "live": live}
            for name, feed in self.fed.items():
                feed(given[name])
            self._advance()
            self.logits.copy_(self.scores[:, 0], non_blocking=True)
            self.taken_host.copy_(self.taken, non_blocking=True)
        return Stepped(self.logits.numpy(), int(self.taken_host))

    def swap(self, pairs: Mapping[str, str]) -> None:
        """Let the next step read what the last one wrote, by (input, output) names: copied, as addresses are fixed."""
        with self.device.active():
            for name, output in pairs.items():
                self.arrays[name].copy_(self.new[output])


class _Feed:
    """An input, and the pinned memory on the way to it."""

    def __init__(self, device: Device, target: Tensor) -> None:
        self.target, self.host = target, device.host(tuple(target.shape), target.dtype)

    def __call__(self, values: np.ndarray) -> None:
        self.host.numpy()[:] = values
        self.target.copy_(self.host, non_blocking=True)


def _ports(program: Program) -> Ports:
    return Ports({n: s.shape for n, s in program.inputs.items()}, {n: s.shape for n, s in program.outputs.items()})
