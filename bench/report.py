"""A result as a table on the terminal, and as markdown, JSON and a plot beside each other."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from modpass.bench.plot import save_plot
from modpass.bench.result import Measurement, Result, Row
from modpass.errors import InputError
from modpass.files import whole_file

__all__ = ["HEADINGS", "markdown", "markdown_grid", "mebibytes", "table", "write_report"]

HEADINGS = ("runner", "efficiency", "speed-up", "ideal", "dense ms", "routed ms", "peak memory", "note")
_NONE = "–"


def table(result: Result) -> Table:
    """The rows as a ``rich`` table; a skipped or failed runner keeps its row, with the reason.

    Efficiency is the share of the ideal speed-up that was reached; in brackets are quartiles.
    """
    title = f"{_title(result)}; ideal {result.ideal:.2f}×"
    grid = Table(title=title, caption=_machine(result), title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    for heading in ("runner", "efficiency", "speed-up", "dense, routed ms", "note"):
        grid.add_column(heading, overflow="fold", no_wrap=heading != "note")
    for row in result.rows:
        # As Text: a reason may hold brackets, which rich would take for markup.
        grid.add_row(*map(Text, _narrow_cells(result, row)))
    return grid


def _narrow_cells(result: Result, row: Row) -> tuple[str, ...]:
    """The same figures in two lines a row, so that they fit a terminal of 80 columns."""
    runner, efficiency, ratio, _, dense, routed, peak, note = _cells(result, row)
    if row.ratio is None:
        return (runner, efficiency, ratio, dense, note)
    return (runner, efficiency, ratio.replace(" ", "\n", 1), f"{dense}\n{routed}", f"peak {peak}; {note}")


def markdown(result: Result, plot: str | None = None) -> str:
    """The whole report as markdown; ``plot`` is the address of a picture to show."""
    sections = [
        f"# {_title(result)}",
        markdown_grid(HEADINGS, [_cells(result, row) for row in result.rows]),
        _LEGEND,
        *([f"![speed-up of each runner]({plot})"] if plot else []),
        "## Routed blocks",
        markdown_grid(("block", "tokens", "dense GFLOP", "routed GFLOP"), _block_cells(result)),
        "## What was measured",
        markdown_grid(("", ""), [*_facts(result).items()]),
    ]
    if result.command:
        sections.append(f"## Command\n\n```sh\n{result.command}\n```")
    return "\n\n".join(sections) + "\n"


def write_report(result: Result, path: str | os.PathLike[str]) -> tuple[Path, Path, Path]:
    """Write ``path`` (markdown) and beside it the same name with ``.json`` and ``.png``; return the three.

    Each file is written whole or not at all.

    Raises:
        InputError: ``path`` does not end in ``.md``.
        MissingExtraError: matplotlib is not installed.
        StateError: the result cannot be written as JSON.
    """
    target = Path(path)
    if target.suffix != ".md":
        raise InputError(f"the report '{target}' must end in .md; its data and plot are written beside it")
    data, plot = target.with_suffix(".json"), target.with_suffix(".png")
    with whole_file(plot) as temporary:
        save_plot(result, temporary)
    with whole_file(data) as temporary:
        temporary.write_text(result.to_json(), encoding="utf-8")
    with whole_file(target) as temporary:
        temporary.write_text(markdown(result, plot.name), encoding="utf-8")
    return target, data, plot


_LEGEND = (
    "Efficiency is speed-up divided by ideal. Speed-up is the median over rounds of dense by routed time, "
    "measured in turn in one run; ideal is counted operations, dense by routed. In brackets: first and third "
    "quartile. Peak memory is what one call adds at most to what the loaded model holds, dense then routed."
)


def _title(result: Result) -> str:
    shapes = ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in result.inputs.items())
    parts = "" if result.case.parts == "block" else f" of each {result.case.parts}"
    return f"{result.name}: {shapes}; {result.case.dtype}, capacity {result.case.capacity:g}{parts}"


def _machine(result: Result) -> str:
    h = result.hardware
    return f"{h.cpu}, {h.cores} cores, {h.threads} threads; GPU: {h.gpu or 'none'}"


def _cells(result: Result, row: Row) -> tuple[str, ...]:
    efficiency, ratio = result.efficiency(row), row.ratio
    if efficiency is None or ratio is None or row.dense is None or row.routed is None:
        return (row.runner, *[_NONE] * (len(HEADINGS) - 2), f"{row.status}: {row.reason}")
    return (
        row.runner,
        f"{efficiency:.0%}",
        f"{ratio.value:.2f}× [{ratio.q1:.2f}, {ratio.q3:.2f}]",
        f"{result.ideal:.2f}×",
        _milliseconds(row.dense),
        _milliseconds(row.routed),
        f"{mebibytes(row.dense.peak_bytes)}, {mebibytes(row.routed.peak_bytes)}",
        f"{len(row.dense.timing.samples)} rounds; ratio of medians {ratio.of_medians:.2f}×",
    )


def _milliseconds(measurement: Measurement) -> str:
    t = measurement.timing
    return f"{t.median * 1e3:.4g} [{t.q1 * 1e3:.4g}, {t.q3 * 1e3:.4g}]"


def mebibytes(peak: int | None) -> str:
    """A size in MiB, which may be unknown.

    >>> mebibytes(3 << 20)
    '3.0 MiB'
    """
    return "unknown" if peak is None else f"{peak / 2**20:.1f} MiB"


def _block_cells(result: Result) -> list[tuple[str, ...]]:
    dense, routed = result.dense_flops.blocks, result.routed_flops.blocks
    return [
        (name, str(k), *(f"{f[name] / 1e9:.4g}" if name in f else _NONE for f in (dense, routed)))
        for name, k in result.routed_flops.slots.items()
    ]


def _facts(result: Result) -> dict[str, str]:
    return {
        "operations, dense": f"{result.dense_flops.total / 1e9:.4g} GFLOP",
        "operations, routed": f"{result.routed_flops.total / 1e9:.4g} GFLOP",
        **{name: str(value or "none") for name, value in asdict(result.hardware).items()},
        **{name: str(value) for name, value in asdict(result.case).items()},
        **dict(result.versions),
    }


def markdown_grid(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A markdown table; cells keep to one line."""
    lines = [headings, tuple("---" for _ in headings), *rows]
    clean = ([" ".join(cell.replace("|", "\\|").split()) for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in clean)
