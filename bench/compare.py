"""Two benchmarks of the same cases, before and after: what became slower, beside how noisy each was."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from modpass.bench.result import Result, Row
from modpass.bench.sweep import Sweep, key
from modpass.bench.timing import Timing
from modpass.errors import InputError

__all__ = ["By", "Change", "Comparison", "compare", "comparison_table"]

By = Literal["both", "ratio", "time"]


@dataclass(frozen=True)
class Change:
    """One figure of one row, before and after: medians, and the spans from first to third quartile.

    worse: how much worse it became, as a share: a time that rose, or a speed-up that fell.
    """

    row: str
    figure: str
    unit: str
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    worse: float
    judged: bool

    @property
    def noisy(self) -> bool:
        """Whether the two spans overlap."""
        return self.before[0] <= self.after[2] and self.after[0] <= self.before[2]


@dataclass(frozen=True)
class Comparison:
    """Every change, what is on one side alone, and why times are not judged (None: they are)."""

    changes: tuple[Change, ...]
    lost: tuple[str, ...]
    unmatched: tuple[str, ...]
    note: str | None

    def slower(self, share: float) -> list[str]:
        """A sentence for each judged figure that became worse by more than ``share``, and each row that is lost."""
        worse = [
            f"{c.row}: {c.figure} {_figure(c, c.before)} to {_figure(c, c.after)}, {c.worse:.1%} worse"
            for c in self.changes
            if c.judged and c.worse > share
        ]
        return worse + [f"{row}: measured before, and not any more" for row in self.lost]


def compare(before: Sweep, after: Sweep, by: By = "both") -> Comparison:
    """Compare two benchmarks row by row.

    Judged are the speed-up of routed over dense, measured in turn and so steady on a noisy machine, and both times,
    which mean something on the same machine alone: between two machines times are shown and not judged.

    Args:
        before, after: the same cases and runners; what only one of them has is listed.
        by: judge "ratio", "time" or "both".

    Raises:
        InputError: no row is in both, or the two are of models that differ in size.
    """
    if by not in get_args(By):
        raise InputError(f"by is {by!r}; it must be one of {', '.join(map(repr, get_args(By)))}")
    olds, news = _rows(before.results), _rows(after.results)
    common = [name for name in olds if name in news]
    measured = [name for name in common if news[name].status == "measured" and olds[name].status == "measured"]
    if not measured and not any(olds[n].status == "measured" for n in common):
        raise InputError(f"no measured row is in both benchmarks; before: {', '.join(olds)}; now: {', '.join(news)}")
    _refuse_other_models(before, after)
    note = _other_machine(before.results[0], after.results[0])
    changes = [c for name in measured for c in _changes(name, olds[name], news[name], by, times=note is None)]
    lost = tuple(n for n in common if olds[n].status == "measured" and n not in measured)
    return Comparison(tuple(changes), lost, tuple(sorted(olds.keys() ^ news.keys())), note)


def comparison_table(comparison: Comparison, share: float | None) -> Table:
    """The changes as a table; what is worse than ``share`` is marked."""
    caption = "medians, in brackets first and third quartile; worse by: a time that rose, a speed-up that fell"
    if comparison.note:
        caption += f"\ntimes are shown and not judged: {comparison.note}"
    if comparison.unmatched:
        caption += f"\nin one of the two alone: {', '.join(comparison.unmatched)}"
    grid = Table(
        title="before and after", caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD
    )
    for heading in ("row", "figure", "before", "after", "worse by", "note"):
        grid.add_column(heading, justify="right" if heading == "worse by" else "left", overflow="fold")
    for c in comparison.changes:
        failed = share is not None and c.judged and c.worse > share
        note = "SLOWER" if failed else "" if c.judged else "not judged"
        note = f"{note}{', ' * bool(note)}within noise" if c.noisy else note
        cells = (c.row, c.figure, _span(c, c.before), _span(c, c.after), f"{c.worse:+.1%}", note)
        grid.add_row(*map(Text, cells))
    return grid


def _rows(results: Iterable[Result]) -> dict[str, Row]:
    return {f"{key(r.case)} {row.runner}": row for r in results for row in r.rows if row.status != "skipped"}


def _refuse_other_models(before: Sweep, after: Sweep) -> None:
    """Rows are matched by their case, which says nothing of the model; its dense operations do."""
    news = {key(r.case): r for r in after.results}
    for old in before.results:
        new = news.get(key(old.case))
        if new is not None and not math.isclose(old.dense_flops.total, new.dense_flops.total, rel_tol=0.01):
            raise InputError(
                f"'{old.name}' before and '{new.name}' now are not the same model: dense, {key(old.case)} takes "
                f"{old.dense_flops.total:.4g} operations before and {new.dense_flops.total:.4g} now; compare with a "
                "benchmark of the same model"
            )


def _other_machine(old: Result, new: Result) -> str | None:
    for name in ("cpu", "threads", "gpu"):
        was, now = getattr(old.hardware, name), getattr(new.hardware, name)
        if was != now:
            return f"{name} was {was}, now it is {now}"
    return None


def _changes(name: str, old: Row, new: Row, by: By, times: bool) -> Iterable[Change]:
    was, now = old.ratio, new.ratio
    assert was is not None
    assert now is not None
    spans = (was.q1, was.value, was.q3), (now.q1, now.value, now.q3)
    yield Change(name, "speed-up", "×", *spans, was.value / now.value - 1, by != "time")
    for variant in ("routed", "dense"):
        before, after = (getattr(row, variant).timing for row in (old, new))
        worse = after.median / before.median - 1
        yield Change(name, f"{variant} time", "ms", _times(before), _times(after), worse, times and by != "ratio")


def _times(timing: Timing) -> tuple[float, float, float]:
    return timing.q1 * 1e3, timing.median * 1e3, timing.q3 * 1e3


def _figure(change: Change, span: tuple[float, float, float]) -> str:
    return f"{span[1]:.2f}×" if change.unit == "×" else f"{span[1]:.4g} ms"


def _span(change: Change, span: tuple[float, float, float]) -> str:
    digits = ".2f" if change.unit == "×" else ".4g"
    return f"{_figure(change, span)} [{span[0]:{digits}}, {span[2]:{digits}}]"
