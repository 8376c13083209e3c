"""The picture of a report: each runner's speed-up against the ideal one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modpass.bench.result import Result
from modpass.errors import require

__all__ = ["save_plot"]


def save_plot(result: Result, path: Path) -> None:
    """Draw a bar per runner with its quartiles, and lines at 1 and at the ideal; write it as PNG.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure_module = require("matplotlib.figure", "bench")
    # A figure of its own, not pyplot's: no global state, no display.
    figure = figure_module.Figure(figsize=(8, 1.6 + 0.4 * len(result.rows)), layout="constrained")
    axes = figure.add_subplot()
    for position, row in enumerate(result.rows):
        ratio = row.ratio
        if ratio is None:
            note = f"{row.status}: {row.reason}"[:80]
            axes.text(0.02, position, note, va="center", color="gray", size="small")
        else:
            whiskers = [[ratio.value - ratio.q1], [ratio.q3 - ratio.value]]
            axes.barh(position, ratio.value, xerr=whiskers, color="tab:blue", height=0.6, capsize=3)
    _label(axes, result)
    figure.savefig(path, format="png", dpi=120)


def _label(axes: Any, result: Result) -> None:
    axes.axvline(1.0, color="black", linewidth=0.8, label="dense")
    axes.axvline(result.ideal, color="tab:red", linestyle="--", label=f"ideal {result.ideal:.2f}×")
    axes.set_yticks(range(len(result.rows)), [row.runner for row in result.rows])
    axes.set_xlim(0, 1.1 * max([1.0, result.ideal, *(row.ratio.q3 for row in result.rows if row.ratio)]))
    axes.set_ylim(-0.6, len(result.rows) - 0.4)
    axes.invert_yaxis()
    axes.set_xlabel("speed-up of routed over dense")
    axes.set_title(f"{result.name}, capacity {result.case.capacity:g}", size="medium", loc="left")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
