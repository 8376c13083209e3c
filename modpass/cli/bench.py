"""``modpass bench``: the routed model beside the dense one under every runner, over a grid of cases."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modpass.cli import bench_options as many
from modpass.cli.console import console, progress, progresses
from modpass.cli.options import Dims, Every, GateOption, PartsOption, Seed, SelectionOption, parse_dims
from modpass.cli.source import Routing, load_source, refuse_routed
from modpass.errors import InputError, ModpassError

if TYPE_CHECKING:
    from modpass.bench import Case, Plan, Runner, Source, Sweep

__all__ = ["command"]

BenchModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="A bundled model (smollm2-135m, minilm-l6, dinov2-small), a folder written by 'modpass transform', a "
        "Hugging Face folder, or package.module:factory; or the JSON of an earlier report, to compare, judge or "
        "report it again without measuring.",
    ),
]
Decode = Annotated[
    bool,
    typer.Option("--decode", help="Measure decode instead: tokens per second, one row, at the end of a full cache."),
]
MaxSequence = Annotated[
    int, typer.Option("--max-sequence", metavar="N", min=32, help="With --decode: tokens that the caches hold.")
]


def command(
    model: BenchModel,
    batch: many.BatchSizes = None,
    sequence: many.Sequences = None,
    dim: Dims = None,
    capacity: many.Capacities = None,
    dtype: many.Dtypes = None,
    every: Every = None,
    gate: GateOption = None,
    selection: SelectionOption = None,
    parts: PartsOption = None,
    runner: many.Runners = None,
    seconds: many.Seconds = 0.0,
    repeats: many.Repeats = 20,
    warmup: many.Warmup = 3,
    peers: many.Peers = True,
    blocks: many.BlockTimes = True,
    out: many.Out = None,
    fresh: many.Fresh = False,
    compare: many.Compare = None,
    fail_if_slower: many.FailIfSlower = None,
    compare_by: many.CompareBy = "both",
    judge: many.Judge = False,
    seed: Seed = 0,
    decode: Decode = False,
    max_sequence: MaxSequence = 1024,
) -> None:
    """Measure MODEL dense and routed in turn, over a grid.

    Reported are the speed-up, its share of the ideal (the ratio of counted operations), times and memory. A
    dense MODEL is transformed first, with random routers.
    """
    from modpass.bench import Plan, read_results

    if fail_if_slower is not None and compare is None:
        raise typer.BadParameter("there is nothing to be slower than; give --compare", param_hint="'--fail-if-slower'")
    earlier = None if compare is None else read_results(compare)
    capacities = many.split(capacity, many.share, "--capacity")
    if decode:
        _decode(model, capacities, every, max_sequence, repeats, warmup, seed, out)
        return
    given = Routing(every=every, gate=gate, selection=selection, parts=parts).given()
    if model.endswith(".json") and Path(model).is_file():
        grid = {
            "batch": batch,
            "sequence": sequence,
            "dim": dim,
            "capacity": capacity,
            "dtype": dtype,
            "runner": runner,
        }
        _refuse_for_report(model, [*given, *(name for name, value in grid.items() if value)])
        sweep = read_results(Path(model))
    else:
        axes: dict[str, list[Any]] = {
            "dtype": many.split(dtype, many.dtype, "--dtype") or ["float32"],
            "batch": many.split(batch, many.count, "--batch") or [1],
            "sequence": many.split(sequence, many.count, "--sequence"),
            "capacity": capacities,
        }
        cases = _cases(model, {**given, "dims": parse_dims(dim), "seed": seed}, axes)
        plan = Plan(warmup, repeats, seconds, peers, blocks)
        sweep = _sweep(model, cases, _runners(runner), plan, out, fresh, [*given, *["capacity"][: len(capacities)]])
    _report(sweep, out, earlier, fail_if_slower, compare_by, judge)


def _refuse_for_report(model: str, options: list[str]) -> None:
    """Refuse options that say how to measure: a report was measured already."""
    if options:
        message = f"'{model}' is a report, which was measured already; leave it out"
        raise typer.BadParameter(message, param_hint=f"'--{options[0]}'")


def _cases(model: str, given: dict[str, Any], axes: dict[str, list[Any]]) -> list[Case]:
    """Every combination; an axis without a value keeps that of the model's case."""
    from modpass.bench import CASES, Case

    case = replace(CASES.get(model, Case(model, sequence=None)), **given)
    known = {name: values for name, values in axes.items() if values}
    return [replace(case, **dict(zip(known, values, strict=True))) for values in product(*known.values())]


def _sweep(
    model: str,
    cases: list[Case],
    runners: tuple[Runner, ...],
    plan: Plan,
    out: Path | None,
    fresh: bool,
    given: list[str],
) -> Sweep:
    from modpass.bench import run_sweep

    with progresses(1 if len(cases) == 1 else 2) as bars:
        tell = bars[-1]

        def load(dtype: Any) -> Source:
            tell("loading", 0, 0)
            source = load_source(model, dtype)
            refuse_routed(source, *given)
            return source

        return run_sweep(cases, runners, plan, load, out, tell, bars[0] if len(bars) > 1 else None, fresh)


def _report(sweep: Sweep, out: Path | None, earlier: Sweep | None, share: float | None, by: Any, judged: bool) -> None:
    """Print and write what was found, then fail for what is not as it should be."""
    from modpass.bench import table
    from modpass.bench.compare import compare, comparison_table
    from modpass.bench.judge import bound_table, judge
    from modpass.bench.sweep_report import sweep_table, write_sweep

    single = len(sweep.results) == 1 and not any(row.peers for row in sweep.results[0].rows)
    console().print(table(sweep.results[0]) if single else sweep_table(sweep))
    verdicts = judge(sweep) if judged else []
    if judged:
        console().print(bound_table(verdicts))
    if out is not None:
        written = write_sweep(sweep, out, re.sub(r"[^\w.-]+", "-", sweep.name), verdicts)
        console().print(f"wrote {', '.join(map(str, written))}", markup=False)
    slower = []
    if earlier is not None:
        comparison = compare(earlier, sweep, by)
        console().print(comparison_table(comparison, share))
        slower = [] if share is None else comparison.slower(share)
    _check(sweep)
    if slower:
        raise ModpassError(f"{len(slower)} of the figures became worse by more than {share:.4g}: {'; '.join(slower)}")
    if judged and not verdicts:
        raise ModpassError("no row was measured that a bound could be held against")
    if missed := [f"{v.row} ({v.asked}: {v.found})" for v in verdicts if not v.passed]:
        raise ModpassError(f"{len(missed)} of {len(verdicts)} bounds do not hold: {'; '.join(missed)}")


def _check(sweep: Sweep) -> None:
    """A failure that only a table tells would be missed by a script."""
    if sweep.failures:
        sentences = "; ".join(f"{name}: {reason}" for name, reason in sweep.failures.items())
        raise ModpassError(f"{len(sweep.failures)} of the cases failed: {sentences}")
    rows = [row for result in sweep.results for row in result.rows]
    if failed := dict.fromkeys(row.runner for row in rows if row.status == "failed"):
        raise ModpassError(f"these runners failed, see the table: {', '.join(failed)}")
    if not any(row.status == "measured" for row in rows):
        raise ModpassError("no runner could run here, see the table")


def _runners(names: list[str] | None) -> tuple[Runner, ...]:
    from modpass.bench import runners_named

    flat = [n for name in names or () for n in many.split(name, str, "--runner")]
    try:
        return runners_named(list(dict.fromkeys(flat)) or None)
    except InputError as e:
        raise typer.BadParameter(str(e), param_hint="'--runner'") from e


def _decode(
    model: str,
    capacities: list[float],
    every: int | None,
    max_sequence: int,
    repeats: int,
    warmup: int,
    seed: int,
    out: Path | None,
) -> None:
    from modpass.bench.decode import decode_table, run_decode
    from modpass.files import whole_file

    if len(capacities) > 1:
        raise typer.BadParameter("with --decode there is one", param_hint="'--capacity'")
    with progress() as tell:
        tell("loading", 0, 0)
        result = run_decode(
            load_source(model), capacity=(capacities or [0.125])[0], every=every or 2, max_sequence=max_sequence,
            rounds=repeats, warmup=warmup, seed=seed, tell=tell,
        )  # fmt: skip
    console().print(decode_table(result))
    if out is not None:
        name = re.sub(r"[^\w.-]+", "-", result.name)
        with whole_file(out / f"{name}.decode.json") as temporary:
            temporary.write_text(result.to_json() + "\n")
