"""One routed model in several precisions: size, error, agreement, and speed in turn, in ONNX Runtime on the CPU.

``modpass study precision [MODEL]`` prints a table; the reference is the float32 file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

import modpass
from modpass.bench.models import BUNDLED, load_bundled, load_tokenizer
from modpass.exporters import FixedShape
from modpass.exporters.conversion import as_onnx
from modpass.exporters.draws import drawn, draws
from modpass.exporters.onnx_session import open_session
from modpass.exporters.precision import to_precision
from modpass.exporters.quantise import quantise

__all__ = ["PRECISIONS", "PrecisionRow", "measure_bundled", "measure_precisions", "table"]

Array = np.ndarray[Any, Any]

PRECISIONS: dict[str, Callable[[ir.Model, Sequence[str]], ir.Model]] = {
    "float32": lambda graph, _: graph,
    "float16": lambda graph, choices: to_precision(graph, "float16", choices=choices),
    "int8": lambda graph, _: quantise(graph, "int8"),
    "fp8": lambda graph, _: quantise(graph, "fp8"),
    "int4": lambda graph, _: quantise(graph, "int4"),
}


@dataclass(frozen=True)
class PrecisionRow:
    """One precision beside float32.

    size: bytes of the file. max_error, mean_error: of the first output, as a share of its largest and its mean
    absolute value. chosen: the share of equal token choices over all routed blocks. likeliest: the share of
    positions at which the first output is largest in the same place. speed: how many times as fast, the median over
    rounds in which the files take turns.
    """

    precision: str
    size: int
    max_error: float
    mean_error: float
    chosen: float
    likeliest: float
    speed: float


def measure_precisions(
    model: modpass.RoutedModel,
    shape: FixedShape,
    folder: Path,
    *,
    inputs: Mapping[str, Array] | None = None,
    precisions: Sequence[str] = tuple(PRECISIONS),
    rounds: int = 5,
    threads: int | None = None,
) -> list[PrecisionRow]:
    """Export ``model`` once, convert it to each precision, and run them all on the same inputs.

    Args:
        model: the routed model, in float32.
        shape: of the export.
        folder: where files go.
        inputs: by name, in place of drawn ones.
        precisions: names of ``PRECISIONS``; float32 is always measured.
        rounds: of the timing; the figures of speed need several.
        threads: of ONNX Runtime; None leaves it to it.

    Raises:
        ModpassError: the model cannot be exported or converted, or ONNX Runtime refuses a file.
    """
    graph, indices = as_onnx(model, shape)
    choices = list(indices.values())
    feed = {**drawn(draws(model, shape), 0), **(inputs or {})}
    sessions: dict[str, Any] = {}
    for name in dict.fromkeys(["float32", *precisions]):
        path = folder / f"{name}.onnx"
        ir.save(PRECISIONS[name](graph, choices), path)
        sessions[name] = open_session(path, threads=threads, outputs=choices)
    found = {name: _run(session, feed) for name, session in sessions.items()}
    seconds = _in_turn({name: partial(_run, s, feed) for name, s in sessions.items()}, rounds)
    return [_row(name, (folder / f"{name}.onnx").stat().st_size, found, len(choices), seconds) for name in sessions]


def _run(session: Any, feed: Mapping[str, Array]) -> list[Array]:
    kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    given = {i.name: feed[i.name].astype(kinds.get(i.type, feed[i.name].dtype)) for i in session.get_inputs()}
    outputs: list[Array] = session.run(None, given)
    return outputs


def _in_turn(works: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            start = perf_counter()
            work()
            seconds[name].append(perf_counter() - start)
    return seconds


def _row(
    name: str, size: int, found: Mapping[str, list[Array]], blocks: int, seconds: Mapping[str, list[float]]
) -> PrecisionRow:
    outputs, wanted = found[name], found["float32"]
    mine, theirs = outputs[0].astype(np.float64), wanted[0].astype(np.float64)
    gap = np.abs(mine - theirs)
    pairs = list(zip(outputs[len(outputs) - blocks :], wanted[len(wanted) - blocks :], strict=True))
    equal = sum(len(np.intersect1d(a, b)) for m, t in pairs for a, b in zip(m, t, strict=True))
    return PrecisionRow(
        name,
        size,
        float(gap.max() / np.abs(theirs).max()),
        float(gap.mean() / np.abs(theirs).mean()),
        equal / sum(t.size for _, t in pairs) if pairs else 1.0,
        float((mine.argmax(-1) == theirs.argmax(-1)).mean()),
        median(f / s for f, s in zip(seconds["float32"], seconds[name], strict=True)),
    )


def table(rows: Sequence[PrecisionRow]) -> str:
    """The rows as markdown.

    >>> print(table([PrecisionRow("int8", 10**6, 0.01, 0.002, 0.99, 0.98, 1.5)]).splitlines()[-1])
    | int8 | 1.0 MB | 1.00 % | 0.20 % | 99.0 % | 98.0 % | 1.50× |
    """
    head = "| | file | max error | mean error | same tokens chosen | same likeliest token | speed |"
    lines = [
        f"| {r.precision} | {r.size / 1e6:.1f} MB | {r.max_error:.2%} | {r.mean_error:.2%} | {r.chosen:.1%} | "
        f"{r.likeliest:.1%} | {r.speed:.2f}× |".replace("%", " %")
        for r in rows
    ]
    return "\n".join([head, "|---" * 7 + "|", *lines])


def measure_bundled(
    name: str, *, sequence: int = 256, capacity: float = 0.125, dense: bool = False, rounds: int = 5
) -> list[PrecisionRow]:
    """The rows of a bundled model on modpass's own source text, routed by routers that were never trained.

    Args:
        name: of a bundled model; where it reads no text, its inputs are drawn.
        sequence: in tokens.
        capacity: of each routed block.
        dense: route nothing, which shows the error of the precision alone.
        rounds: of the timing.

    Raises:
        ModpassError: there is no such model, or a size does not fit it.
    """
    model = load_bundled(name)
    torch.manual_seed(0)
    routed = modpass.trace(model) if dense else modpass.mod_transform(model, capacity, gate="unit")
    with tempfile.TemporaryDirectory() as folder:
        inputs = _text(name, sequence)
        return measure_precisions(routed, FixedShape(1, sequence), Path(folder), inputs=inputs, rounds=rounds)


def _text(model: str, sequence: int) -> dict[str, Array]:
    """The beginning of modpass's own source; none for a model that reads no text."""
    if BUNDLED[model].tokenizer is None:
        return {}
    source = Path(str(modpass.__file__)).with_name("functional.py").read_text(encoding="utf-8")
    ids = load_tokenizer(model)(source)["input_ids"][:sequence]
    return {"input_ids": np.array([ids], np.int64)}
