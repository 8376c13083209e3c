"""What the project promises of its speed, as bounds on the rows of a benchmark, each with pass or fail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from modpass.bench.result import Result, Row
from modpass.bench.sweep import Sweep, key
from modpass.bench.timing import Ratio

__all__ = ["EFFICIENCY", "OVERHEAD", "PLAIN", "Bound", "bound_table", "judge"]

EFFICIENCY = 0.97  # at least, of the ratio of counted operations
OVERHEAD = 0.02  # at most, that routing every token costs over dense
PLAIN = "torch.onnx.export"


@dataclass(frozen=True)
class Bound:
    """One bound on one row: what was asked, what was found with its quartiles, and whether it holds."""

    row: str
    asked: str
    found: str
    passed: bool


def judge(sweep: Sweep) -> list[Bound]:
    """Every bound that the rows of a sweep can be held against.

    Routed: at least 97 % of the ideal speed-up; where every token is routed, at most 2 % over dense. Dense: at
    least as fast as the file of the plain exporter; two files that differ by less than their noise count as equal.

    >>> judge(Sweep(()))
    []
    """
    return [v for result in sweep.results for row in result.rows if row.ratio for v in _bounds(result, row)]


def bound_table(bounds: Iterable[Bound]) -> Table:
    """The bounds as a table."""
    grid = Table(title="bounds", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("", "row", "bound", "found (medians, quartiles)"):
        grid.add_column(heading, overflow="fold")
    for v in bounds:
        grid.add_row(*map(Text, ("pass" if v.passed else "FAIL", v.row, v.asked, v.found)))
    return grid


def _bounds(result: Result, row: Row) -> Iterable[Bound]:
    name = f"{key(result.case)} {row.runner}"
    ratio = row.ratio
    assert ratio is not None
    if result.case.capacity == 1.0:
        cost = 1 / ratio.value - 1
        found = f"{cost:+.1%} [{1 / ratio.q3 - 1:+.1%}, {1 / ratio.q1 - 1:+.1%}]"
        yield Bound(name, f"routing every token costs at most {OVERHEAD:.0%}", found, cost <= OVERHEAD)
    else:
        share = ratio.value / result.ideal
        quartiles = f"[{ratio.q1 / result.ideal:.1%}, {ratio.q3 / result.ideal:.1%}]"
        found = f"{share:.1%} {quartiles}: {ratio.value:.3f}× of {result.ideal:.3f}×"
        yield Bound(name, f"efficiency at least {EFFICIENCY:.0%}", found, share >= EFFICIENCY)
    for peer in row.peers:
        if peer.name == PLAIN:
            over = row.over(peer)
            asked = f"dense at least as fast as {PLAIN}"
            if over is None:
                yield Bound(name, asked, f"not measured: {peer.reason}", False)
            else:
                yield Bound(name, asked, _equal_or_faster(over), over.value >= 1 or over.q3 >= 1)


def _equal_or_faster(over: Ratio) -> str:
    noise = ", equal within noise" if over.value < 1 <= over.q3 else ""
    return f"{over.value:.3f}× [{over.q1:.3f}, {over.q3:.3f}]{noise}"
