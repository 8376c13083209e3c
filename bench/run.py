"""One case from its model to a result: dense and routed side by side under every runner."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from modpass import RoutedModel
from modpass.bench.cases import Case
from modpass.bench.flops import FlopCount, count_flops
from modpass.bench.hardware import command_line, hardware, versions
from modpass.bench.inputs import inputs_at
from modpass.bench.result import Measurement, Result, Row
from modpass.bench.runners import RUNNERS, Runner
from modpass.bench.sources import Source, load_model
from modpass.bench.timing import interleave, synchronize_gpu
from modpass.bench.variants import Variants, make_variants
from modpass.errors import InputError
from modpass.exporters import FixedShape

__all__ = ["Plan", "measure", "run_case"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Plan:
    """How long to measure: dropped rounds, rounds at least, seconds of calls at least per runner."""

    warmup: int = 3
    repeats: int = 20
    min_seconds: float = 0.0


def run_case(
    case: Case,
    runners: Sequence[Runner] | None = None,
    plan: Plan | None = None,
    source: Source | None = None,
    workdir: Path | None = None,
    progress: Progress | None = None,
    command: str | None = None,
) -> Result:
    """Measure ``case`` dense and routed under each runner.

    Args:
        case: what to measure.
        runners: all of ``RUNNERS`` by default; one that cannot run keeps its row with the reason.
        plan: how long to measure.
        source: the model, if it is loaded already.
        workdir: where exports and engines are kept; a temporary folder by default.
        progress: called as (what is being done, rounds done, rounds expected).
        command: the command line for the report; that of this process by default.

    Raises:
        InputError: the case does not fit the model, or the model does not run at its shape.
        TraceError, BlockError: the model cannot be traced or routed.

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    >>> source = Source(encoder, (torch.randn(2, 6, 8),), "encoder")
    >>> round(run_case(Case("encoder", sequence=64, capacity=0.25), [], source=source).ideal, 2)
    1.78
    """
    source = source or load_model(case.model, case.torch_dtype)
    tell = progress or (lambda what, done, expected: None)
    tell("tracing", 0, 0)
    variants = make_variants(case, source)
    shape = FixedShape(batch=case.batch, sequence=case.sequence, dims=dict(case.dims))
    inputs = inputs_at(variants.routed.inputs, shape)
    dense_flops, routed_flops = _counted(variants, inputs)
    with ExitStack() as stack:
        folder = workdir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="modpass-bench-")))
        rows = [
            measure(runner, variants.by_name(), inputs, folder, plan or Plan(), tell)
            for runner in (RUNNERS.values() if runners is None else runners)
        ]
    return Result(
        case=variants.case,
        name=source.name,
        rows=tuple(rows),
        dense_flops=dense_flops,
        routed_flops=routed_flops,
        inputs={name: tuple(tensor.shape) for name, tensor in inputs.items()},
        hardware=hardware(),
        versions=versions(),
        command=command_line() if command is None else command,
    )


def _counted(variants: Variants, inputs: Mapping[str, Tensor]) -> tuple[FlopCount, FlopCount]:
    """Operations of both; the first time that the model meets the shape of the case."""
    blocks = variants.routed.routed_blocks
    try:
        return count_flops(variants.dense, inputs, blocks), count_flops(variants.routed, inputs, blocks)
    except (RuntimeError, IndexError, TypeError, ValueError) as e:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
        raise InputError(f"the model does not run on {shapes}: {_first_line(e)}") from e


def measure(
    runner: Runner,
    models: Mapping[str, RoutedModel],
    inputs: Mapping[str, Tensor],
    workdir: Path,
    plan: Plan,
    progress: Progress,
) -> Row:
    """One row: prepare ``models["dense"]`` and ``models["routed"]``, then their memory, then their times.

    A runner that is not available gives a skipped row, one that raises a failed row; both say why.
    """
    if reason := runner.available():
        return Row(runner.name, "skipped", reason=reason)
    try:
        return _measured(runner, models, inputs, workdir, plan, progress)
    except Exception as e:  # one runner's fault must not cost the rows of the others
        return Row(runner.name, "failed", reason=f"{type(e).__name__}: {_first_line(e)}")


def _measured(
    runner: Runner,
    models: Mapping[str, RoutedModel],
    inputs: Mapping[str, Tensor],
    workdir: Path,
    plan: Plan,
    progress: Progress,
) -> Row:
    calls, peaks = {}, {}
    for name, model in models.items():
        progress(f"{runner.name}: preparing {name}", 0, 0)
        folder = workdir / name
        folder.mkdir(parents=True, exist_ok=True)
        calls[name] = runner.prepare(model, inputs, folder)
        peaks[name] = runner.peak_bytes(calls[name])
    timings = interleave(
        calls,
        plan.warmup,
        plan.repeats,
        plan.min_seconds,
        progress=lambda done, expected: progress(f"{runner.name}: measuring", done, expected),
        synchronize=synchronize_gpu if runner.device == "cuda" else None,
    )
    dense, routed = (Measurement(timings[name], peaks[name]) for name in ("dense", "routed"))
    return Row(runner.name, "measured", dense, routed)


def _first_line(error: Exception) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    return next(iter(plain.splitlines()), "no message")
