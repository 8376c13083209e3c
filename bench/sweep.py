"""Many cases of one model, one after the other; each row is kept in a folder, so that a sweep goes on after a stop."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from modpass.bench.cases import Case
from modpass.bench.hardware import hardware, versions
from modpass.bench.measuring import Plan, Progress, Runner
from modpass.bench.result import SCHEMA, Result, Row
from modpass.bench.run import run_case
from modpass.bench.sources import Source
from modpass.errors import InputError, ModpassError, StateError
from modpass.files import whole_file

__all__ = ["Sweep", "key", "read_results", "run_sweep"]

CELLS, SETTINGS = "cells", "settings.json"
SWEPT = ("batch", "sequence", "capacity", "dtype")


@dataclass(frozen=True)
class Sweep:
    """What a sweep found: a result for each case that ran, and why the others did not."""

    results: tuple[Result, ...]
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The model's name."""
        return self.results[0].name

    def to_json(self) -> str:
        """Every result, with all samples.

        Raises:
            StateError: a value has no place in JSON.
        """
        data = {"schema": SCHEMA, "results": [r.to_dict() for r in self.results], "failures": dict(self.failures)}
        try:
            return json.dumps(data, indent=1, allow_nan=False) + "\n"
        except (TypeError, ValueError) as e:
            raise StateError(f"the sweep of '{self.name}' cannot be written as JSON: {e}") from e


def key(case: Case) -> str:
    """What tells a case from the others of its sweep; also its file's name.

    >>> key(Case("m", sequence=512))
    'b1-s512-c0.125-float32'
    """
    sequence = "" if case.sequence is None else f"s{case.sequence}-"
    return f"b{case.batch}-{sequence}c{case.capacity:g}-{case.dtype}"


def read_results(path: Path) -> Sweep:
    """The results in a JSON file of a benchmark or of a sweep.

    Raises:
        InputError: there is no such file, or it holds no result.
        StateError: it is not such JSON, or of another schema.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise InputError(f"the benchmark '{path}' cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise StateError(f"'{path}' is not the JSON of a benchmark: {e}") from e
    if not (isinstance(raw, dict) and isinstance(raw.get("results"), list)):
        return Sweep((Result.from_dict(raw),))
    if not raw["results"]:
        raise InputError(f"the benchmark '{path}' holds no result")
    return Sweep(tuple(map(Result.from_dict, raw["results"])), raw.get("failures") or {})


def run_sweep(
    cases: Sequence[Case],
    runners: Sequence[Runner],
    plan: Plan,
    load: Callable[[str], Source],
    folder: Path | None = None,
    progress: Progress | None = None,
    overall: Progress | None = None,
    fresh: bool = False,
    command: str | None = None,
) -> Sweep:
    """Measure each case under each runner; rows that ``folder`` holds already are taken over.

    Args:
        cases: what to measure; they differ in batch, sequence, capacity and dtype alone.
        runners, plan: how.
        load: gives the model with weights of a dtype.
        folder: where each row is kept as soon as it is measured; nowhere by default.
        progress, overall: called as (what is being done, done, expected), for a row and for the whole.
        fresh: drop what the folder holds first.
        command: the command line for the report.

    Raises:
        InputError: there is nothing to measure.
        StateError: the folder holds rows that were measured with other settings.
        ModpassError: no case could be measured; that of the first.
    """
    if not cases:
        raise InputError("there is no case to measure; give at least one")
    store = None if folder is None else _Store(folder, cases[0], plan, fresh)
    results, failures, errors = [], {}, []
    models: dict[str, Source] = {}
    for done, case in enumerate(cases):
        if overall is not None:
            overall(key(case), done, len(cases))
        before = None if store is None else store.load(case)
        rows = [] if before is None else [r for r in before.rows if _stands(r, runners)]
        if before is not None and {r.name for r in runners} <= {r.runner for r in rows}:
            results.append(replace(before, rows=tuple(r for n in runners for r in rows if r.runner == n.name)))
            continue
        try:
            if case.dtype not in models:
                models = {case.dtype: load(case.dtype)}  # one at a time in memory
            keep = None if store is None else store.keeper(case, before)
            source = models[case.dtype]
            results.append(run_case(case, runners, plan, source, None, progress, command, rows, keep))
        except ModpassError as e:  # one case's fault must not cost the others
            failures[key(case)] = str(e)
            errors.append(e)
    if not results:
        raise errors[0]
    return Sweep(tuple(results), failures)


def _stands(row: Row, runners: Sequence[Runner]) -> bool:
    """Whether a kept row need not be measured again: it was measured, or still cannot be. A failed one may."""
    skipped = row.status == "skipped" and any(r.name == row.runner and r.available() for r in runners)
    return row.status == "measured" or skipped


class _Store:
    """The folder of a sweep: its settings, and a file for each case."""

    def __init__(self, folder: Path, case: Case, plan: Plan, fresh: bool) -> None:
        self.folder = folder / CELLS
        if fresh and self.folder.is_dir():
            shutil.rmtree(self.folder)
        wanted = _settings(case, plan)
        settings = self.folder / SETTINGS
        if settings.is_file():
            _refuse_others(self.folder, _read(settings), wanted)
        else:
            with whole_file(settings) as temporary:
                temporary.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")

    def load(self, case: Case) -> Result | None:
        path = self._path(case)
        if not path.is_file():
            return None
        try:
            found = Result.from_json(path.read_text(encoding="utf-8"))
        except (StateError, UnicodeDecodeError) as e:
            raise StateError(f"'{path}' cannot be taken over: {e}; remove it, or give --fresh") from e
        if (own := key(found.case)) != key(case):
            raise StateError(f"'{path}' cannot be taken over: it holds the case {own}; remove it, or give --fresh")
        return found

    def keeper(self, case: Case, before: Result | None) -> Callable[[Result], None]:
        """What writes a result, beside rows of runners that are not asked for this time."""

        def keep(result: Result) -> None:
            present = {row.runner for row in result.rows}
            others = () if before is None else tuple(r for r in before.rows if r.runner not in present)
            with whole_file(self._path(case)) as temporary:
                temporary.write_text(replace(result, rows=result.rows + others).to_json(), encoding="utf-8")

        return keep

    def _path(self, case: Case) -> Path:
        return self.folder / f"{key(case)}.json"


def _settings(case: Case, plan: Plan) -> dict[str, Any]:
    fixed = {name: value for name, value in asdict(case).items() if name not in SWEPT}
    machine = {name: value for name, value in asdict(hardware()).items() if name != "system"}
    return json.loads(json.dumps({**fixed, **asdict(plan), **machine, **versions()}))  # type: ignore[no-any-return]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return dict(found)
    except (ValueError, TypeError) as e:
        raise StateError(f"'{path}' does not hold the settings of a sweep: {e}; give --fresh to begin anew") from e


def _refuse_others(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Rows of two settings, machines or versions in one table would compare what cannot be compared."""
    for name in {**wanted, **found}:
        if (was := found.get(name)) != (now := wanted.get(name)):
            raise StateError(
                f"the rows in '{folder}' were measured with {name} {was!r}, and here it is {now!r}; "
                "go on with the same settings, write to another folder, or give --fresh to measure all of them anew"
            )
