"""``modpass study``: studies of what routing costs in quality, and of what an export can do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from modpass.cli.console import console, grid, progress

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, help="What routing costs in quality, and what exports can do.")

Out = Annotated[
    Path,
    typer.Option("--out", metavar="DIR", file_okay=False, help="Keeps what is done; a study that stopped goes on."),
]
Quick = Annotated[bool, typer.Option("--quick", help="A fraction of the work: shows that it works, proves nothing.")]
Why = Annotated[
    bool,
    typer.Option(
        "--why", help="Instead: does it matter which tokens go through? Pairs from the same seeds, same steps."
    ),
]


@app.command()
def isoflop(out: Out, quick: Quick = False, why: Why = False) -> None:
    """Train dense and routed decoders on real text to the same number of operations."""
    if why:
        _why(out, quick)
        return
    from modpass.bench.isoflop import FULL, QUICK
    from modpass.bench.isoflop import isoflop as study
    from modpass.bench.study_report import HEADINGS, study_table, verdict

    with progress() as tell:
        results = study(out, QUICK if quick else FULL, tell)
    found = ", ".join(f"{name} {value:.4f}" for name, value in verdict(results).items() if value is not None)
    _show(HEADINGS, study_table(results), [f"best routed over best dense: {found}"], out / "isoflop.json")


def _why(out: Path, quick: bool) -> None:
    from modpass.bench.study_why import WHY, WHY_HEADINGS, WHY_QUICK, why, why_table

    with progress() as tell:
        results = why(out, WHY_QUICK if quick else WHY, tell)
    _show(WHY_HEADINGS, why_table(results), [], out / "why.json", "why.md")


@app.command()
def adapt(out: Out, quick: Quick = False) -> None:
    """Route SmolLM2-135M without training, tune it briefly, and compare it with dropping layers."""
    from modpass.bench.adapt import FULL, QUICK
    from modpass.bench.adapt import adapt as study
    from modpass.bench.adapt_report import adapt_headings, adapt_table, verdict

    with progress() as tell:
        results = study(out, QUICK if quick else FULL, tell)
    found = [
        f"  {name}: {', '.join(f'{text} {ratio:.3f}' for text, ratio in ratios.items())}"
        for name, ratios in verdict(results).items()
    ]
    lines = ["perplexity over the best that dropping reaches at as many operations:", *found]
    _show(adapt_headings(results), adapt_table(results), lines, out / "adapt.json")


@app.command()
def long(
    sequence: Annotated[int, typer.Argument(metavar="SEQUENCE", min=1, help="Tokens.", show_default="65536")] = 65_536,
) -> None:
    """Export a small decoder at a length beyond TensorRT's TopK, compare it with PyTorch, build its engine.

    The default length needs 3 GB of memory.
    """
    from modpass.bench.long import measure_long

    with progress() as tell, TemporaryDirectory() as folder:
        row = measure_long(sequence, Path(folder), tell)
    typer.echo(str(row))


@app.command()
def precision(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A bundled model.")] = "smollm2-135m",
    sequence: Annotated[int, typer.Option("--sequence", metavar="N", min=1, help="Tokens.")] = 256,
    capacity: Annotated[float, typer.Option("--capacity", metavar="SHARE", help="Of each routed block.")] = 0.125,
    dense: Annotated[bool, typer.Option("--dense", help="Route nothing: the error of the precision alone.")] = False,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="Of the timing.")] = 5,
) -> None:
    """Run one model in float32, float16, int8, fp8 and int4: size, error, agreement and speed on the CPU."""
    from modpass.bench.precision import measure_bundled, table

    rows = measure_bundled(model, sequence=sequence, capacity=capacity, dense=dense, rounds=rounds)
    typer.echo(table(rows))


def _show(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    lines: Iterable[str],
    written: Path,
    beside: str = ".md and .png",
) -> None:
    table = grid(*headings, numbers=tuple(headings[1:]))
    for row in rows:
        table.add_row(*row)
    screen = console()
    screen.print(table)
    for line in lines:
        screen.print(line)
    screen.print(f"written to {written}, {beside} beside it", soft_wrap=True)
