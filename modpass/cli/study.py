"""``modpass study``: training studies that say what routing costs in quality."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modpass.cli.console import console, grid, progress

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, help="Train small models and compare what they reach.")


@app.callback()
def _studies() -> None:
    """Keep ``isoflop`` a word of its own while it is the only study."""


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
