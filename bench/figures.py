"""The figures of a report, as SVG that a page can hold inline."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from modpass.bench.result import Measurement, Result, Row
from modpass.bench.sweep import Sweep, key
from modpass.errors import require

__all__ = ["Picture", "pictures"]

DENSE, ROUTED, IDEAL, PEER = "#7a869a", "#1f6feb", "#d1242f", "#b5bdc9"
_SHOWN_PROFILES = 4


@dataclass(frozen=True)
class Picture:
    """One figure: its heading, what it shows, and its data as an address for ``<img src>``."""

    heading: str
    caption: str
    address: str


@dataclass(frozen=True)
class _Line:
    """A measured row with the name that tells it from the others."""

    name: str
    result: Result
    row: Row


def pictures(sweep: Sweep) -> list[Picture]:
    """Every figure that the rows of a sweep have data for.

    Raises:
        MissingExtraError: matplotlib is not installed.

    >>> pictures(Sweep(()))
    []
    """
    lines = [
        _Line(f"{key(result.case)}\n{row.runner}", result, row)
        for result in sweep.results
        for row in result.rows
        if row.status == "measured"
    ]
    if not lines:
        return []
    found = [
        _drawn(
            "Speed-up against ideal",
            "Routed over dense, medians of the ratios of each round, whiskers at the quartiles; the red mark is the "
            "ratio of counted operations.",
            _height(lines, 0.42),
            lambda figure: _speedups(figure.add_subplot(), lines),
        ),
        _drawn(
            "Latency",
            "Bar: half of the calls took no longer (p50); dot: 90 % (p90); cross: 99 % (p99). Peers are what other "
            "tools made of the dense model.",
            _height(lines, 0.3 * max(2 + len(line.row.peers) for line in lines)),
            lambda figure: _latencies(figure.add_subplot(), lines),
        ),
    ]
    if any(m.peak_bytes is not None for line in lines for m in (line.row.dense, line.row.routed) if m):
        found.append(
            _drawn(
                "Memory",
                "What one call adds at most to what the loaded model holds.",
                _height(lines, 0.5),
                lambda figure: _memories(figure.add_subplot(), lines),
            )
        )
    return found + _profiles(lines)


def _height(lines: Sequence[_Line], each: float) -> tuple[float, float]:
    return 9.0, 1.2 + max(each, 0.42) * len(lines)


def _drawn(heading: str, caption: str, size: tuple[float, float], draw: Callable[[Any], None]) -> Picture:
    matplotlib = require("matplotlib", "bench")
    figure_module = require("matplotlib.figure", "bench")
    text = io.BytesIO()
    # svg.hashsalt and no date: the same rows give the same file.
    with matplotlib.rc_context(
        {"svg.hashsalt": "modpass", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = figure_module.Figure(figsize=size, layout="constrained")
        draw(figure)
        figure.savefig(text, format="svg", metadata={"Date": None})
    data = base64.b64encode(text.getvalue()).decode("ascii")
    return Picture(heading, caption, f"data:image/svg+xml;base64,{data}")


def _speedups(axes: Any, lines: Sequence[_Line]) -> None:
    # Not the whiskers: one noisy row would press all the others flat.
    width = 1.4 * max(1.0, *(max(x.result.ideal, x.row.ratio.value) for x in lines if x.row.ratio))
    for y, line in enumerate(lines):
        ratio, ideal = line.row.ratio, line.result.ideal
        assert ratio is not None
        whiskers = [[ratio.value - ratio.q1], [ratio.q3 - ratio.value]]
        axes.barh(y, ratio.value, xerr=whiskers, color=ROUTED, height=0.55, capsize=3, error_kw={"linewidth": 1})
        axes.plot([ideal, ideal], [y - 0.42, y + 0.42], color=IDEAL, linewidth=2.5)
        place = min(max(ideal, ratio.q3), 0.82 * width)
        axes.text(place, y + 0.3, f"  {ratio.value:.2f}× of {ideal:.2f}×", va="center", size="small")
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, width)
    axes.set_xlabel("times as fast as dense")
    _name_rows(axes, lines)


def _latencies(axes: Any, lines: Sequence[_Line]) -> None:
    for y, line in enumerate(lines):
        bars = _bars(line)
        height = 0.8 / len(bars)
        for i, (label, colour, measurement) in enumerate(bars):
            place = y - 0.4 + height * (i + 0.5)
            p50, p90, p99 = (measurement.timing.percentile(p) * 1e3 for p in (50, 90, 99))
            axes.barh(place, p50, color=colour, height=0.86 * height)
            axes.plot([p50, p99], [place, place], color="black", linewidth=0.8)
            axes.plot(p90, place, "o", color="black", markersize=3.5)
            axes.plot(p99, place, "x", color="black", markersize=4.5)
            axes.text(p99, place, f"  {label} {p50:.4g}", va="center", size="x-small")
    axes.set_xlabel("milliseconds")
    axes.set_xlim(0, 1.3 * max(m.timing.percentile(99) * 1e3 for x in lines for _, _, m in _bars(x)))
    _name_rows(axes, lines)


def _bars(line: _Line) -> list[tuple[str, str, Measurement]]:
    row = line.row
    assert row.dense is not None
    assert row.routed is not None
    peers = [(p.name, PEER, p.measurement) for p in row.peers if p.measurement is not None]
    return [("dense", DENSE, row.dense), ("routed", ROUTED, row.routed), *peers]


def _memories(axes: Any, lines: Sequence[_Line]) -> None:
    for y, line in enumerate(lines):
        for place, (label, colour, measurement) in zip((y - 0.2, y + 0.2), _bars(line)[:2], strict=True):
            if measurement.peak_bytes is not None:
                size = measurement.peak_bytes / 2**20
                axes.barh(place, size, color=colour, height=0.36)
                axes.text(size, place, f"  {label} {size:.4g}", va="center", size="x-small")
    axes.set_xlabel("MiB")
    axes.margins(x=0.25)
    _name_rows(axes, lines)


def _name_rows(axes: Any, lines: Sequence[_Line]) -> None:
    axes.set_yticks(range(len(lines)), [line.name for line in lines])
    axes.set_ylim(-0.6, len(lines) - 0.4)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)


def _profiles(lines: Sequence[_Line]) -> list[Picture]:
    profiled = [x for x in lines if x.row.dense and x.row.routed and x.row.dense.blocks and x.row.routed.blocks]
    shown = profiled[:_SHOWN_PROFILES]
    if not shown:
        return []
    more = f" The first {len(shown)} of {len(profiled)} profiled rows." if len(profiled) > len(shown) else ""
    return [
        _drawn(
            "Time in each block",
            "From a profiled call of the same file; routed blocks are named in bold. Operators that run outside of "
            f"all blocks (embedding, head, masks) are the last bar.{more}",
            (9.0, 2.6 * len(shown)),
            lambda figure: _profile_all(figure, shown),
        )
    ]


def _profile_all(figure: Any, lines: Sequence[_Line]) -> None:
    for axes, line in zip(figure.subplots(len(lines), squeeze=False)[:, 0], lines, strict=True):
        assert line.row.dense is not None
        assert line.row.routed is not None
        names = [n for n in line.row.dense.blocks if n] + [""]
        for shift, colour, label, blocks in (
            (-0.2, DENSE, "dense", line.row.dense.blocks),
            (0.2, ROUTED, "routed", line.row.routed.blocks),
        ):
            heights = [blocks.get(name, 0.0) * 1e3 for name in names]
            axes.bar([x + shift for x in range(len(names))], heights, 0.38, color=colour, label=label)
        axes.set_xticks(range(len(names)), [n.rpartition(".")[2] if n else "outside" for n in names])
        for tick, name in zip(axes.get_xticklabels(), names, strict=True):
            tick.set_fontweight("bold" if name in line.result.routed_flops.slots else "normal")
        axes.set_ylabel("milliseconds")
        axes.set_title(line.name.replace("\n", ", "), loc="left", size="medium")
        axes.legend(frameon=False, ncols=2, loc="upper left")
        axes.margins(x=0.01, y=0.25)
