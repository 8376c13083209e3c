"""A sweep as one HTML page that needs nothing else: figures are inline, and nothing is loaded or run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from statistics import median
from typing import Any

from modpass.bench.figures import pictures
from modpass.bench.judge import Bound
from modpass.bench.sweep import Sweep
from modpass.bench.sweep_report import HEADINGS, LEGEND, facts, machine, row_cells, sweep_title
from modpass.errors import require

__all__ = ["html_page"]


def html_page(sweep: Sweep, bounds: Sequence[Bound] = ()) -> str:
    """The whole report: rows, figures, the machine, and the bounds where they were judged.

    Raises:
        MissingExtraError: jinja2 or matplotlib is not installed.
    """
    jinja2 = require("jinja2", "bench")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    source = resources.files("modpass.bench").joinpath("templates/report.html.j2").read_text(encoding="utf-8")
    page: str = environment.from_string(source).render(
        title=sweep_title(sweep),
        machine=machine(sweep),
        cards=_cards(sweep),
        headings=HEADINGS,
        legend=LEGEND,
        rows=[{"cells": cells, "peer": peer} for cells, peer in row_cells(sweep)],
        failures=sweep.failures,
        bounds=bounds,
        pictures=pictures(sweep),
        facts=facts(sweep),
        command=sweep.results[-1].command,
    )
    return page + "\n"


def _cards(sweep: Sweep) -> list[dict[str, Any]]:
    """The figures that a reader looks for first."""
    pairs = [(result, row) for result in sweep.results for row in result.rows if row.ratio]
    if not pairs:
        return [{"value": "0", "label": "rows measured"}]
    best, row = max(pairs, key=lambda p: p[1].ratio.value if p[1].ratio else 0.0)
    shares = [result.efficiency(r) or 0.0 for result, r in pairs]
    assert row.ratio is not None
    return [
        {"value": f"{row.ratio.value:.2f}×", "label": f"best speed-up ({row.runner}); ideal {best.ideal:.2f}×"},
        {"value": f"{median(shares):.0%}", "label": "median efficiency"},
        {"value": str(len(pairs)), "label": f"rows measured in {len(sweep.results)} cases"},
    ]
