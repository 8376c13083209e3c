"""Which transformers can be routed and exported: every registered architecture, measured."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from modpass.bench.coverage_models import FAMILIES, model_names
from modpass.bench.coverage_pool import Job, run_jobs
from modpass.bench.coverage_report import Comparison, compare, render
from modpass.bench.coverage_result import CoverageResult, CoverageRow
from modpass.bench.coverage_stages import STAGES, run_stages
from modpass.errors import InputError
from modpass.exporters.manifest import versions

__all__ = ["Comparison", "CoverageResult", "CoverageRow", "compare", "render", "run"]

_PRELOAD = ("modpass.bench.coverage_warm",)


def run(
    family: str | None = None,
    only: Iterable[str] | None = None,
    *,
    jobs: int = 1,
    timeout_s: float = 300.0,
    last: str = STAGES[-1],
    progress: bool = True,
) -> CoverageResult:
    """Put every architecture of a family through the stages, each in a process of its own.

    Args:
        family: "causal-lm", "encoder", "image", "encoder-decoder" or "other"; None: all of them.
        only: names of architectures, such as "llama"; None: all.
        jobs: how many processes run at once.
        timeout_s: seconds for one model, all stages together.
        last: the stage after which to stop.
        progress: show a bar on the error stream.

    Raises:
        InputError: there is no such family, architecture or stage, or a number is too small.

    >>> run("other", jobs=0)
    Traceback (most recent call last):
    modpass.errors.InputError: jobs is 0 and timeout_s 300; both must be positive
    """
    if last not in STAGES:
        raise InputError(f"there is no stage '{last}'; there are: {', '.join(STAGES)}")
    if jobs < 1 or timeout_s <= 0:
        raise InputError(f"jobs is {jobs} and timeout_s {timeout_s:g}; both must be positive")
    wanted = _wanted(FAMILIES if family is None else (family,), None if only is None else list(only))
    work = [Job(row, run_stages, (row.family, row.name, last)) for row in wanted]
    rows = []
    with _bar(progress) as bar:
        task = bar.add_task("", total=len(work))
        for row in run_jobs(work, jobs, timeout_s, _PRELOAD):
            rows.append(row)
            bar.update(task, advance=1, description=row.name)
    order = {(r.family, r.name): i for i, r in enumerate(wanted)}
    rows.sort(key=lambda r: order[r.family, r.name])
    return CoverageResult(tuple(rows), last, versions("transformers"))


def _wanted(families: Iterable[str], only: list[str] | None) -> list[CoverageRow]:
    rows = [CoverageRow(f, name, kind) for f in families for name, kind in model_names(f).items()]
    unknown = [n for n in only or () if n not in {r.name for r in rows}]
    if unknown:
        raise InputError(f"there is no architecture '{unknown[0]}' in {', '.join(families)}")
    return [r for r in rows if only is None or r.name in only]


def _bar(shown: bool) -> Progress:

    return Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not shown,
        transient=True,
    )
