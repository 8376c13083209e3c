"""Which transformers can be routed and exported: every registered architecture, measured."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from modpass.bench.coverage_compare import Comparison, compare
from modpass.bench.coverage_decode import DECODE_STAGES, run_decode_stages
from modpass.bench.coverage_models import FAMILIES, model_names
from modpass.bench.coverage_pool import Job, run_jobs
from modpass.bench.coverage_report import render
from modpass.bench.coverage_result import OUTCOMES, CoverageResult, CoverageRow, code_digest
from modpass.bench.coverage_stages import STAGES, run_stages
from modpass.errors import InputError, StateError
from modpass.exporters.manifest import versions
from modpass.files import whole_file

__all__ = ["Comparison", "CoverageResult", "CoverageRow", "compare", "render", "run", "run_decode"]

STALE = "stale"
_PRELOAD = ("modpass.bench.coverage_warm",)


def run(
    family: str | None = None,
    only: Iterable[str] | None = None,
    *,
    jobs: int = 1,
    timeout_s: float = 300.0,
    last: str = STAGES[-1],
    progress: bool = True,
    record: str | os.PathLike[str] | None = None,
    again: Iterable[str] = (),
) -> CoverageResult:
    """Put every architecture of a family through the stages, each in a process of its own.

    Args:
        family: "causal-lm", "encoder", "image", "encoder-decoder" or "other"; None: all of them.
        only: names of architectures, such as "llama"; None: all.
        jobs: how many processes run at once.
        timeout_s: seconds of processor time for one model, all stages together.
        last: the stage after which to stop.
        progress: show a bar on the error stream.
        record: a JSON file that holds the rows as they come; a row that it already holds is not measured again,
            so that an interrupted run goes on where it was.
        again: outcomes, such as "refused", whose rows in ``record`` are measured again; "stale": rows that were
            measured with other code of the pass.

    Raises:
        InputError: there is no such family, architecture, stage or outcome, or a number is too small.
        StateError: ``record`` is no coverage result, or one of a run to another stage.

    >>> run("other", jobs=0)
    Traceback (most recent call last):
    modpass.errors.InputError: jobs is 0 and timeout_s 300; both must be positive
    """
    if last not in STAGES:
        raise InputError(f"there is no stage '{last}'; there are: {', '.join(STAGES)}")
    wanted = _wanted(FAMILIES if family is None else (family,), None if only is None else list(only))
    work = [Job(row, run_stages, (row.family, row.name, last)) for row in wanted]
    return _measure(work, last, jobs, timeout_s, progress, record, again)


def run_decode(
    only: Iterable[str] | None = None,
    *,
    jobs: int = 1,
    timeout_s: float = 120.0,
    progress: bool = True,
    record: str | os.PathLike[str] | None = None,
    again: Iterable[str] = (),
) -> CoverageResult:
    """Decode every causal language model step by step, beside its full forward; arguments as of ``run``.

    Raises:
        InputError, StateError: as ``run``.

    >>> run_decode([]).rows
    ()
    """
    wanted = _wanted(("causal-lm",), None if only is None else list(only))
    work = [Job(row, run_decode_stages, (row.name,)) for row in wanted]
    return _measure(work, DECODE_STAGES[-1], jobs, timeout_s, progress, record, again)


def _measure(
    work: list[Job],
    last: str,
    jobs: int,
    timeout_s: float,
    progress: bool,
    record: str | os.PathLike[str] | None,
    again: Iterable[str],
) -> CoverageResult:
    if jobs < 1 or timeout_s <= 0:
        raise InputError(f"jobs is {jobs} and timeout_s {timeout_s:g}; both must be positive")
    again = set(again)
    if unknown := sorted(again - {*OUTCOMES, STALE}):
        raise InputError(f"there is no outcome '{unknown[0]}'; there are: {', '.join(OUTCOMES)} and {STALE}")
    order = {job.row.key: i for i, job in enumerate(work)}
    done, code = _Record(None if record is None else Path(record), last), code_digest()
    left = [replace(job, row=replace(job.row, code=code)) for job in work if not done.holds(job.row, again)]
    with _bar(progress) as bar:
        task = bar.add_task("", total=len(left))
        for row in run_jobs(left, jobs, timeout_s, _PRELOAD):
            done.add(row)
            bar.update(task, advance=1, description=row.name)
    registered = {f: list(model_names(f)) for f in dict.fromkeys(job.row.family for job in work)}
    rows = [r for r in done.result.rows if r.key in order]
    return replace(done.result, rows=tuple(sorted(rows, key=lambda r: order[r.key])), registered=registered)


class _Record:
    """The rows so far, kept in a file where one is given."""

    def __init__(self, path: Path | None, last: str) -> None:
        self.path = path
        self.result = CoverageResult((), last, versions("transformers"))
        if path is not None and path.exists():
            self.result = CoverageResult.from_json(path.read_text())
            if self.result.last != last:
                raise StateError(f"'{path}' holds a run up to the stage '{self.result.last}', not '{last}'")

    def holds(self, row: CoverageRow, again: set[str]) -> bool:
        """Whether the row is there and need not be measured again."""
        stale = code_digest() if STALE in again else None
        return any(
            r.key == row.key and r.outcome not in again and (stale is None or r.code == stale) for r in self.result.rows
        )

    def add(self, row: CoverageRow) -> None:
        others = (r for r in self.result.rows if r.key != row.key)
        self.result = replace(self.result, rows=(*others, row), versions=versions("transformers"))
        if self.path is not None:
            with whole_file(self.path) as temporary:
                temporary.write_text(self.result.to_json())


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
