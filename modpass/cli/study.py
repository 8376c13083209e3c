"""``modpass study``: training studies that say what routing costs in quality."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modpass.cli.console import console, grid, progress

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, help="Train small models and compare what they reach.")


@app.command()
def isoflop(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", file_okay=False, help="Keeps every run; one that stopped goes on.")
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="A fraction of the training: shows that it works, proves nothing.")
    ] = False,
) -> None:
    """Train dense and routed decoders on real text to the same number of operations."""
    from modpass.bench.isoflop import FULL, QUICK
    from modpass.bench.isoflop import isoflop as study
    from modpass.bench.study_report import HEADINGS, study_table, verdict

    with progress() as tell:
        results = study(out, QUICK if quick else FULL, tell)
    table = grid(*HEADINGS, numbers=HEADINGS[1:])
    for row in study_table(results):
        table.add_row(*row)
    screen = console()
    screen.print(table)
    found = verdict(results)
    named = ", ".join(f"{name} {value:.4f}" for name, value in found.items() if value is not None)
    screen.print(f"best routed over best dense: {named}")
    screen.print(f"written to {out / 'isoflop.json'}, .md and .png beside it", soft_wrap=True)


@app.command()
def adapt(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", file_okay=False, help="Keeps every variant; a study goes on there.")
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="A few short rows: shows that it works, proves nothing.")
    ] = False,
) -> None:
    """Route SmolLM2-135M without training, tune it briefly, and compare it with dropping layers."""
    from modpass.bench.adapt import FULL, QUICK
    from modpass.bench.adapt import adapt as study
    from modpass.bench.adapt_report import adapt_headings, adapt_table, verdict

    with progress() as tell:
        results = study(out, QUICK if quick else FULL, tell)
    headings = adapt_headings(results)
    table = grid(*headings, numbers=headings[1:])
    for row in adapt_table(results):
        table.add_row(*row)
    screen = console()
    screen.print(table)
    screen.print("perplexity over the best that dropping reaches at as many operations:")
    for name, found in verdict(results).items():
        screen.print(f"  {name}: {', '.join(f'{text} {ratio:.3f}' for text, ratio in found.items())}")
    screen.print(f"written to {out / 'adapt.json'}, .md and .png beside it", soft_wrap=True)
