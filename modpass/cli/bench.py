"""``modpass bench``: the routed model beside the dense one under every runner."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modpass.cli.console import console, progress
from modpass.cli.options import (
    Batch,
    Capacity,
    Dims,
    Dtype,
    Every,
    GateOption,
    Model,
    PartsOption,
    Seed,
    SelectionOption,
    parse_dims,
)
from modpass.cli.source import Routing, load_source, refuse_routed
from modpass.errors import InputError, ModpassError

if TYPE_CHECKING:
    from modpass.bench import Case, Result, Runner

__all__ = ["command"]

Tokens = Annotated[
    int | None,
    typer.Option(
        "--sequence",
        metavar="N",
        min=1,
        show_default="the model's case",
        help="Tokens per sequence. Needed for a model that is not bundled, unless its inputs' sizes fix it.",
    ),
]
Runners = Annotated[
    list[str] | None,
    typer.Option(
        "--runner",
        metavar="NAME",
        show_default="all",
        help="A way to run: torch, torch-compile, onnxruntime, torch-cuda, torch-compile-cuda, "
        "onnxruntime-cuda, tensorrt, tensorrt-rtx. May be repeated; one that cannot run here is listed with "
        "the reason.",
    ),
]
Seconds = Annotated[
    float,
    typer.Option(
        "--seconds",
        metavar="S",
        min=0,
        help="Measure each runner for this long at least, in seconds of calls.",
    ),
]
Repeats = Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Measured rounds at least.")]
Warmup = Annotated[int, typer.Option("--warmup", metavar="N", min=0, help="Rounds dropped before measuring.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        file_okay=False,
        show_default="none",
        help="Also write a report into this folder: markdown, JSON, plot (pip install 'modpass[bench]').",
    ),
]
Decode = Annotated[
    bool,
    typer.Option("--decode", help="Measure decode instead: tokens per second, one row, at the end of a full cache."),
]
MaxSequence = Annotated[
    int, typer.Option("--max-sequence", metavar="N", min=32, help="With --decode: tokens that the caches hold.")
]
WeightsDtype = Annotated[Dtype, typer.Option("--dtype", help="Type of the weights.")]


def command(
    model: Model,
    batch: Batch = 1,
    sequence: Tokens = None,
    dim: Dims = None,
    capacity: Capacity = None,
    every: Every = None,
    gate: GateOption = None,
    selection: SelectionOption = None,
    parts: PartsOption = None,
    runner: Runners = None,
    seconds: Seconds = 0.0,
    repeats: Repeats = 20,
    warmup: Warmup = 3,
    out: Out = None,
    dtype: WeightsDtype = "float32",
    seed: Seed = 0,
    decode: Decode = False,
    max_sequence: MaxSequence = 1024,
) -> None:
    """Measure MODEL dense and routed in turn.

    Reported are the speed-up, its share of the ideal (the ratio of counted operations), times and memory. A
    dense MODEL is transformed first, with random routers.
    """
    from modpass.bench import Plan, run_case, table

    if decode:
        _decode(model, capacity, every, max_sequence, repeats, warmup, seed, out)
        return
    given = Routing(capacity=capacity, every=every, gate=gate, selection=selection, parts=parts).given()
    sizes = {"batch": batch, "dims": parse_dims(dim)}
    case = _case(model, {**given, **sizes, "dtype": dtype, "seed": seed}, sequence)
    runners = _runners(runner)
    with progress() as tell:
        tell("loading", 0, 0)
        source = load_source(model, dtype)
        refuse_routed(source, *given)
        result = run_case(case, runners, Plan(warmup, repeats, seconds), source, progress=tell)
    console().print(table(result))
    if out is not None:
        _write(result, out)
    _check(result)


def _decode(
    model: str,
    capacity: float | None,
    every: int | None,
    max_sequence: int,
    repeats: int,
    warmup: int,
    seed: int,
    out: Path | None,
) -> None:
    from modpass.bench.decode import decode_table, run_decode
    from modpass.files import whole_file

    with progress() as tell:
        tell("loading", 0, 0)
        result = run_decode(
            load_source(model), capacity=capacity or 0.125, every=every or 2, max_sequence=max_sequence,
            rounds=repeats, warmup=warmup, seed=seed, tell=tell,
        )  # fmt: skip
    console().print(decode_table(result))
    if out is not None:
        name = re.sub(r"[^\w.-]+", "-", result.name)
        with whole_file(out / f"{name}.decode.json") as temporary:
            temporary.write_text(result.to_json() + "\n")


def _case(model: str, given: dict[str, Any], sequence: int | None) -> Case:
    from modpass.bench import CASES, Case

    case = CASES.get(model, Case(model, sequence=None))
    return replace(case, **given, sequence=case.sequence if sequence is None else sequence)


def _runners(names: list[str] | None) -> tuple[Runner, ...]:
    from modpass.bench import runners_named

    try:
        return runners_named(names or None)
    except InputError as e:
        raise typer.BadParameter(str(e), param_hint="'--runner'") from e


def _write(result: Result, folder: Path) -> None:
    from modpass.bench import write_report

    name = re.sub(r"[^\w.-]+", "-", result.name)
    written = write_report(result, folder / f"{name}.md")
    console().print(f"wrote {', '.join(map(str, written))}", markup=False)


def _check(result: Result) -> None:
    """A failure that only a table tells would be missed by a script."""
    if failed := [row.runner for row in result.rows if row.status == "failed"]:
        raise ModpassError(f"these runners failed, see the table: {', '.join(failed)}")
    if not any(row.status == "measured" for row in result.rows):
        raise ModpassError("no runner could run here, see the table")
