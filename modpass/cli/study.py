"""``modpass study``: training studies that say what routing costs in quality."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from modpass.cli.console import console, grid, progress

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, help="Train small models and compare what they reach.")

Out = Annotated[
    Path,
    typer.Option("--out", metavar="DIR", file_okay=False, help="Keeps what is done; a study that stopped goes on."),
]
Quick = Annotated[bool, typer.Option("--quick", help="A fraction of the work: shows that it works, proves nothing.")]


@app.command()
def isoflop(out: Out, quick: Quick = False) -> None:
    """Train dense and routed decoders on real text to the same number of operations."""
    from modpass.bench.isoflop import FULL, QUICK
    from modpass.bench.isoflop import isoflop as study
    from modpass.bench.study_report import HEADINGS, study_table, verdict

    with progress() as tell:
        results = study(out, QUICK if quick else FULL, tell)
    found = ", ".join(f"{name} {value:.4f}" for name, value in verdict(results).items() if value is not None)
    _show(HEADINGS, study_table(results), [f"best routed over best dense: {found}"], out / "isoflop.json")


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


def _show(headings: Sequence[str], rows: Iterable[Sequence[str]], lines: Iterable[str], written: Path) -> None:
    table = grid(*headings, numbers=tuple(headings[1:]))
    for row in rows:
        table.add_row(*row)
    screen = console()
    screen.print(table)
    for line in lines:
        screen.print(line)
    screen.print(f"written to {written}, .md and .png beside it", soft_wrap=True)
