"""Which groups of islands a model needs in float32, found by leaving each out and running what is left."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir

from modpass.errors import InputError
from modpass.exporters.islands import GROUPS
from modpass.exporters.onnx_session import open_session
from modpass.exporters.precision import to_precision
from modpass.exporters.rounded import rounded

__all__ = ["Measured", "measured_islands"]

Array = np.ndarray[Any, Any]
SLACK = 1.1  # a group is needed if the error grows by more than a tenth without it


@dataclass(frozen=True)
class Measured:
    """The groups that are needed, and largest relative errors: with all of ``GROUPS``, and without each of them."""

    needed: tuple[str, ...]
    complete: float
    without: Mapping[str, float]

    def __str__(self) -> str:
        """One line for people."""
        errors = ", ".join(f"without {group} {error:.2g}" for group, error in self.without.items())
        return f"float32 is needed for {', '.join(('router', *self.needed))} (error {self.complete:.2g}; {errors})"


def measured_islands(model: ir.Model, dtype: str, feed: Mapping[str, Array], choices: Collection[str] = ()) -> Measured:
    """Run a float32 ``model`` as float16 rounds, with all groups of islands and without each of them.

    Where a group can be left out and another too, both together may still be too much; then all stay.

    Args:
        model: as ``torch.onnx.export`` writes it.
        dtype: "float16"; ONNX Runtime takes roundings to bfloat16 out of a graph, so nothing shows there.
        feed: inputs by name.
        choices: names of values that say which tokens are chosen.

    Raises:
        InputError: another dtype.
        InputError: another dtype.
        ExportError: ONNX Runtime refuses the graph.

    >>> text = '<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) {a = Mul(x, x) y = Sqrt(a)}'
    >>> measured_islands(ir.from_onnx_text(text), "float16", {"x": np.array([300.0, 1.0], np.float32)}).needed
    ('norms',)
    """
    if dtype != "float16":
        raise InputError(f"islands can be measured for 'float16', not for {dtype!r}; leave them to the rule")
    wanted = _run(model, feed)

    def error(groups: Collection[str]) -> float:
        found = _run(rounded(to_precision(model, "float16", choices=choices, groups=groups)), feed)
        worst = max(float(np.abs(f - w).max() / (np.abs(w).max() or 1.0)) for f, w in zip(found, wanted, strict=True))
        return worst if np.isfinite(worst) else float("inf")

    complete = error(GROUPS)
    without = {group: error([g for g in GROUPS if g != group]) for group in GROUPS}
    needed = tuple(group for group in GROUPS if without[group] > SLACK * complete)
    if error(needed) > SLACK * max(complete, *(without[g] for g in GROUPS if g not in needed), 0.0):
        needed = GROUPS
    return Measured(needed, complete, without)


def _run(model: ir.Model, feed: Mapping[str, Array]) -> list[Array]:
    with TemporaryDirectory() as folder:
        path = Path(folder, "m.onnx")
        ir.save(model, path)
        session = open_session(path)
        outputs = session.run(None, dict(feed))
    return [o.astype(np.float64) for o in outputs]
