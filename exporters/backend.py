"""What runs the two graphs of a decoder: ONNX Runtime, with every input and output bound to memory of ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime

from modpass.errors import ExportError
from modpass.exporters.decoder_manifest import DecoderManifest

__all__ = ["Backend", "OnnxRuntimeBackend"]


class Backend(Protocol):
    """Runs prefill and steps over arrays that are allocated once.

    arrays: caches and routing state, which steps read; new: what the last step returned, by output name.
    """

    arrays: dict[str, np.ndarray]
    new: dict[str, np.ndarray]

    def open(self, folder: Path, manifest: DecoderManifest) -> None:
        """Load the graphs of a folder."""

    def prefill(self, ids: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Fill ``arrays`` from prompts ``[B, S]``; returns logits ``[B, V]`` of each row's last token."""

    def step(self, tokens: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Run one token a row ``[B, 1]``; fills ``new`` and returns logits ``[B, V]``."""


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
        """
        self.manifest = manifest
        step, first = self._session(folder / "decode.onnx"), self._session(folder / "prefill.onnx")
        own = {"position": np.zeros(manifest.batch, np.int64)}
        inputs = {i.name: _zeros(i) for i in step.get_inputs()}
        self.tokens, self.position = inputs[manifest.tokens], inputs["position"]
        self.arrays = {n: a for n, a in inputs.items() if n != manifest.tokens and n not in own}
        self.new = {o.name: _zeros(o) for o in step.get_outputs()}
        self.step_binding = _Bound(step, inputs, self.new)
        prompt = {i.name: _zeros(i) for i in first.get_inputs()}
        self.ids, self.length = prompt[manifest.tokens], prompt["length"]
        self.first = {o.name: self.arrays[o.name] if o.name in self.arrays else _zeros(o) for o in first.get_outputs()}
        self.prefill_binding = _Bound(first, prompt, self.first)

    def _session(self, path: Path) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if self.threads is not None:
            options.intra_op_num_threads = self.threads
        try:
            return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as e:  # pybind turns every kind of refusal into its own
            raise ExportError(f"ONNX Runtime {onnxruntime.__version__} cannot load '{path}': {e}") from e

    def prefill(self, ids: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Fill the caches; see ``Backend``."""
        self.ids[:], self.length[:] = ids, length
        self.prefill_binding.run()
        logits: np.ndarray = self.first[self.manifest.logits][:, 0]
        return logits

    def swap(self, pairs: Mapping[str, str]) -> None:
        """Let the next step read as input what the last one wrote as output, by (input, output) names."""
        for name, output in pairs.items():
            self.arrays[name], self.new[output] = self.new[output], self.arrays[name]
        self.step_binding.bind({n: self.arrays[n] for n in pairs}, {o: self.new[o] for o in pairs.values()})

    def step(self, tokens: np.ndarray, position: np.ndarray) -> np.ndarray:
        """One token a row; see ``Backend``."""
        self.tokens[:], self.position[:] = tokens, position
        self.step_binding.run()
        logits: np.ndarray = self.new[self.manifest.logits][:, 0]
        return logits


_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}


def _zeros(value: Any) -> np.ndarray:
    if value.type not in _TYPES:
        raise ExportError(f"'{value.name}' is {value.type}, which numpy does not have; export in float32 or float16")
    return np.zeros(value.shape, _TYPES[value.type])


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
