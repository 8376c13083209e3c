"""``modpass verify``: is an export still what was written, and does it still compute the same?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from modpass.cli.console import console, grid, status
from modpass.cli.options import Factory
from modpass.cli.source import load_source, traced_dense

__all__ = ["command"]

Target = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        exists=True,
        show_default=False,
        help="A folder of exports, an ONNX file or an engine, each with its manifest.",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        show_default="what was recorded at the export",
        help="Compare the outputs with this model: the one that was exported, routed as it was.",
    ),
]


def command(target: Target, model: ModelOption = None, factory: Factory = None) -> None:
    """Check an export before it is used.

    Hashes, weights, shapes, routed blocks, an engine's target, outputs. Nothing is loaded before its hash fits, and
    nothing is written. The exit code is 0 if all is sound, else 1.
    """
    from modpass.exporters.verdict import verdict

    given = traced_dense(load_source(model, factory=factory)) if model is not None else None
    with status("checking"):
        found = verdict(target, given)
    table = grid("file", "check", "result", "found")
    for check in found.checks:
        table.add_row(*map(Text, (check.file, check.name, check.result, check.detail)))
    console().print(table)
    found.check()
    console().print(str(found), markup=False)
