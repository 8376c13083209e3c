"""A sweep as a table on the terminal, and as JSON, markdown and HTML beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from modpass.bench.judge import Bound
from modpass.bench.report import markdown_grid, mebibytes
from modpass.bench.result import Measurement, Result, Row
from modpass.bench.sweep import SWEPT, Sweep, key
from modpass.files import whole_file

__all__ = [
    "HEADINGS",
    "LEGEND",
    "facts",
    "machine",
    "row_cells",
    "sweep_markdown",
    "sweep_table",
    "sweep_title",
    "write_sweep",
]

HEADINGS = (
    "case", "runner", "efficiency", "speed-up", "ideal", "dense ms: p50, p90, p99", "routed ms: p50, p90, p99",
    "memory MiB", "note",
)  # fmt: skip
LEGEND = (
    "Efficiency is speed-up divided by ideal. Speed-up is the median over rounds of dense by routed time, with its "
    "quartiles; ideal is counted operations, dense by routed. Memory is what one call adds at most to what the "
    "loaded model holds, dense then routed. A grey row is what another tool made of the dense model."
)
_NONE = "–"


def row_cells(sweep: Sweep) -> Iterator[tuple[tuple[str, ...], bool]]:
    """The cells of each row under ``HEADINGS``, and whether it is one of a peer."""
    for result in sweep.results:
        for row in result.rows:
            yield _cells(result, row), False
            for peer in row.peers:
                over = row.over(peer)
                if peer.measurement is None or over is None:
                    note = f"not measured: {peer.reason}"
                    yield (key(result.case), f"└ {peer.name}", *[_NONE] * (len(HEADINGS) - 3), note), True
                else:
                    note = f"our dense is {over.value:.2f}× [{over.q1:.2f}, {over.q3:.2f}] as fast"
                    times, memory = _percentiles(peer.measurement), _memory(peer.measurement)
                    yield (key(result.case), f"└ {peer.name}", *[_NONE] * 3, times, _NONE, memory, note), True


def _cells(result: Result, row: Row) -> tuple[str, ...]:
    efficiency, ratio = result.efficiency(row), row.ratio
    if efficiency is None or ratio is None or row.dense is None or row.routed is None:
        return (key(result.case), row.runner, *[_NONE] * (len(HEADINGS) - 3), f"{row.status}: {row.reason}")
    return (
        key(result.case),
        row.runner,
        f"{efficiency:.0%}",
        f"{ratio.value:.2f}× [{ratio.q1:.2f}, {ratio.q3:.2f}]",
        f"{result.ideal:.2f}×",
        _percentiles(row.dense),
        _percentiles(row.routed),
        f"{_memory(row.dense)}, {_memory(row.routed)}",
        f"{len(row.dense.timing.samples)} rounds",
    )


def _percentiles(measurement: Measurement) -> str:
    return ", ".join(f"{measurement.timing.percentile(p) * 1e3:.4g}" for p in (50, 90, 99))


def _memory(measurement: Measurement) -> str:
    return mebibytes(measurement.peak_bytes).removesuffix(" MiB")


def sweep_table(sweep: Sweep) -> Table:
    """The rows as a ``rich`` table, a line each."""
    grid = Table(
        title=sweep_title(sweep), caption=machine(sweep), title_justify="left", caption_justify="left", box=SIMPLE_HEAD
    )
    for heading in (*HEADINGS[:7], "note"):
        grid.add_column(heading, overflow="fold", no_wrap=heading not in ("note", "runner"))
    for cells, _ in row_cells(sweep):
        # As Text: a reason may hold brackets, which rich would take for markup.
        grid.add_row(*map(Text, (*cells[:7], cells[-1])))
    return grid


def sweep_title(sweep: Sweep) -> str:
    """The model, and what its cases have in common."""
    case = sweep.results[0].case
    common = [
        f"{name} {getattr(case, name)}"
        for name in SWEPT
        if len({getattr(r.case, name) for r in sweep.results}) == 1 and getattr(case, name) is not None
    ]
    return f"{sweep.name}: {', '.join(common)}" if common else sweep.name


def machine(sweep: Sweep) -> str:
    """What it ran on, in one line."""
    h = sweep.results[-1].hardware
    return f"{h.cpu}, {h.cores} cores, {h.threads} threads; GPU: {h.gpu or 'none'}"


def facts(sweep: Sweep) -> dict[str, str]:
    """The machine, the settings that all cases share, the operations of each, and versions."""
    result = sweep.results[-1]
    settings = {n: str(v) for n, v in asdict(result.case).items() if n not in SWEPT and v not in ({}, None)}
    operations = {
        f"operations {key(r.case)}": f"dense {r.dense_flops.total / 1e9:.4g}, routed "
        f"{r.routed_flops.total / 1e9:.4g} GFLOP"
        for r in sweep.results
    }
    blocks = ", ".join(result.routed_flops.slots)
    hardware = {name: str(value or "none") for name, value in asdict(result.hardware).items()}
    return {**hardware, **settings, "routed blocks": blocks, **operations, **dict(result.versions)}


def sweep_markdown(sweep: Sweep) -> str:
    """The rows, the machine and the command as markdown."""
    sections = [
        f"# {sweep_title(sweep)}",
        markdown_grid(HEADINGS, [cells for cells, _ in row_cells(sweep)]),
        LEGEND,
        *(f"{name} failed: {reason}" for name, reason in sweep.failures.items()),
        "## What was measured, and on what",
        markdown_grid(("", ""), [*facts(sweep).items()]),
    ]
    if command := sweep.results[-1].command:
        sections.append(f"## Command\n\n```sh\n{command}\n```")
    return "\n\n".join(sections) + "\n"


def write_sweep(sweep: Sweep, folder: Path, name: str, bounds: Sequence[Bound] = ()) -> tuple[Path, ...]:
    """Write ``name`` with ``.json``, ``.md`` and ``.html`` into ``folder``; return the three.

    Each file is written whole or not at all.

    Raises:
        MissingExtraError: jinja2 or matplotlib is not installed.
        StateError: the sweep cannot be written as JSON.
    """
    from modpass.bench.html import html_page

    pages = {"json": sweep.to_json(), "md": sweep_markdown(sweep), "html": html_page(sweep, bounds)}
    for suffix, text in pages.items():
        with whole_file(folder / f"{name}.{suffix}") as temporary:
            temporary.write_text(text, encoding="utf-8")
    return tuple(folder / f"{name}.{suffix}" for suffix in pages)
