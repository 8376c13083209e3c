"""One case from its model to a result: dense and routed side by side under every runner."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from modpass.bench.cases import Case
from modpass.bench.inputs import inputs_at
from modpass.bench.measuring import Plan, Progress, Runner, begin, measure
from modpass.bench.result import Result, Row
from modpass.bench.runners import RUNNERS
from modpass.bench.sources import Source, load_model
from modpass.bench.variants import make_variants
from modpass.exporters import FixedShape

__all__ = ["Plan", "measure", "run_case"]


def run_case(
    case: Case,
    runners: Sequence[Runner] | None = None,
    plan: Plan | None = None,
    source: Source | None = None,
    workdir: Path | None = None,
    progress: Progress | None = None,
    command: str | None = None,
    done: Sequence[Row] = (),
    keep: Callable[[Result], None] | None = None,
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
        done: rows that were measured before and are taken over as they are.
        keep: called with what there is after each row, so that an interruption costs one row.

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
    plan = plan or Plan()
    source = source or load_model(case.model, case.torch_dtype)
    tell = progress or (lambda what, done, expected: None)
    tell("tracing", 0, 0)
    variants = make_variants(case, source)
    shape = FixedShape(batch=case.batch, sequence=case.sequence, dims=dict(case.dims))
    inputs = inputs_at(variants.routed.inputs, shape)
    result = begin(variants, source.name, inputs, command)
    before = {row.runner: row for row in done}
    with ExitStack() as stack:
        folder = workdir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="modpass-bench-")))
        for runner in RUNNERS.values() if runners is None else runners:
            row = before.get(runner.name) or measure(
                runner, variants.by_name(), inputs, folder, plan, tell, variants.original, variants.blocks
            )
            result = replace(result, rows=(*result.rows, row))
            if keep is not None:
                keep(result)
    return result
