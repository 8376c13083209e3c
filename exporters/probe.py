"""What the model computed when it was exported, beside the file, so that the file can be run against it later.

The inputs are not kept: their seed is, and how they are drawn. Of each output some values are kept, at even
distances, and its scale; of each routed block the tokens that it chose.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from modpass.errors import StateError
from modpass.exporters.draws import Array, Draw
from modpass.files import whole_file

__all__ = ["KEPT", "Probe", "probe_path", "sampled", "scale_of"]

KEPT = 4096  # values of each output
_KEY = "modpass"


@dataclass(frozen=True)
class Probe:
    """What is kept: how inputs are drawn, and by name the sampled outputs, their scales, and choices.

    shapes: of the whole outputs.
    """

    seed: int
    inputs: tuple[Draw, ...]
    shapes: Mapping[str, tuple[int, ...]]
    outputs: Mapping[str, Array]
    scales: Mapping[str, float]
    choices: Mapping[str, Array]

    def save(self, path: Path) -> None:
        """Write it as safetensors, whole or not at all."""
        facts = {
            "seed": self.seed, "inputs": [asdict(d) for d in self.inputs],
            "shapes": dict(self.shapes), "scales": dict(self.scales),
        }  # fmt: skip
        tensors = {f"output:{n}": np.ascontiguousarray(a) for n, a in self.outputs.items()}
        tensors |= {f"choices:{n}": np.ascontiguousarray(a.astype(np.int32)) for n, a in self.choices.items()}
        with whole_file(path) as temporary:
            save_file(tensors, temporary, {_KEY: json.dumps(facts)})

    @classmethod
    def load(cls, path: Path) -> Probe:
        """Read it back.

        Raises:
            StateError: it is not what ``save`` writes.

        >>> Probe.load(Path("absent.safetensors"))
        Traceback (most recent call last):
        modpass.errors.StateError: the probe 'absent.safetensors' cannot be read: ...
        """
        try:
            with safe_open(path, "numpy") as file:
                facts = json.loads((file.metadata() or {})[_KEY])
                tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118  # it is no mapping
            inputs = tuple(Draw(**{**d, "shape": tuple(d["shape"])}) for d in facts["inputs"])
            shapes = {n: tuple(s) for n, s in facts["shapes"].items()}
            return cls(
                int(facts["seed"]), inputs, shapes, _called("output:", tensors), facts["scales"],
                _called("choices:", tensors),
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as e:
            raise StateError(f"the probe '{path}' cannot be read: {e}; export the model again") from e


def probe_path(file: Path) -> Path:
    """Where the probe of an exported file lies.

    >>> probe_path(Path("m.onnx")).name
    'm.onnx.probe.safetensors'
    """
    return file.with_name(f"{file.name}.probe.safetensors")


def sampled(output: Array) -> Array:
    """At most ``KEPT`` values of an output, at even distances, from the first on.

    >>> sampled(np.arange(10_000))[:3].tolist()
    [0, 3, 6]
    """
    return output.reshape(-1)[:: max(1, -(-output.size // KEPT))]


def scale_of(output: Array) -> float:
    """The largest absolute value, over which differences are relative.

    >>> scale_of(np.array([-2.0, 1.0]))
    2.0
    """
    return float(np.abs(output.astype(np.float64)).max()) if output.size else 1.0


def _called(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {n.removeprefix(prefix): a for n, a in tensors.items() if n.startswith(prefix)}
