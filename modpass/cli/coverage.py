"""``modpass coverage``: which architectures can be routed and exported, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["command"]


def command(
    family: Annotated[
        str | None,
        typer.Option(
            "--family",
            show_default="all",
            help="causal-lm, encoder, image, encoder-decoder or other.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="An architecture, such as llama. May be repeated."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes at once.")] = 1,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds for one architecture, all stages together.")
    ] = 300,
    last: Annotated[
        str | None, typer.Option("--last", show_default="tensorrt", help="The stage to stop after.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the rows here, to compare two runs.")] = None,
    against: Annotated[Path | None, typer.Option("--compare", help="Rows of an earlier run to compare with.")] = None,
) -> None:
    """Show which architectures can be routed and exported."""
    from modpass.bench.coverage import CoverageResult, compare, render, run
    from modpass.bench.coverage_stages import STAGES
    from modpass.files import whole_file

    result = run(family, only, jobs=jobs, timeout_s=timeout, last=last or STAGES[-1])
    print(render(result))
    if json is not None:
        with whole_file(json) as temporary:
            temporary.write_text(result.to_json())
    if against is not None:
        print(compare(CoverageResult.from_json(against.read_text()), result))
