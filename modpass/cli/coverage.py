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
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="FILE",
            dir_okay=False,
            help="Keep each row here as it comes; rows that it holds are not measured again.",
        ),
    ] = None,
    again: Annotated[
        str,
        typer.Option(
            "--again",
            metavar="OUTCOMES",
            show_default="none",
            help="Measure rows of the record with these outcomes again, such as refused,failed,wrong; "
            "stale: those of other code.",
        ),
    ] = "",
    json: Annotated[Path | None, typer.Option("--json", help="Write the rows here, to compare two runs.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write the report here.")] = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="Instead: which causal-lm decode step by step as they do in one forward.")
    ] = False,
    against: Annotated[Path | None, typer.Option("--compare", help="Rows of an earlier run to compare with.")] = None,
) -> None:
    """Show which architectures can be routed and exported."""
    from modpass.bench.coverage import CoverageResult, compare, render, run, run_decode
    from modpass.bench.coverage_decode import render_decode
    from modpass.bench.coverage_stages import STAGES
    from modpass.files import whole_file

    outcomes = [o.strip() for o in again.split(",") if o.strip()]
    if decode:
        if family not in (None, "causal-lm") or last is not None:
            raise typer.BadParameter("it takes causal-lm alone, and no --last", param_hint="'--decode'")
        result = run_decode(only, jobs=jobs, timeout_s=timeout, record=record, again=outcomes)
        report = render_decode(result)
    else:
        result = run(family, only, jobs=jobs, timeout_s=timeout, last=last or STAGES[-1], record=record, again=outcomes)
        report = render(result)
    print(report)
    for file, text in ((json, result.to_json()), (markdown, report)):
        if file is not None:
            with whole_file(file) as temporary:
                temporary.write_text(text)
    if against is not None:
        print(compare(CoverageResult.from_json(against.read_text()), result))
