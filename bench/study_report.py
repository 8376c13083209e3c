"""What a study found: the verdict, its table, and the plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modpass.bench.coverage_report import grid
from modpass.bench.study_setup import Run, RunResult
from modpass.errors import InputError, require

__all__ = ["HEADINGS", "save_study_plot", "study_markdown", "study_table", "verdict"]

HEADINGS = ("run", "parameters", "steps", "ms/step", "loss", "causal", "causal, k slots", "accuracy")


def verdict(results: Sequence[RunResult]) -> dict[str, float | None]:
    """The best routed run (every other block) against the best dense one.

    loss: over the best dense one's; step, flops: of one step, over those of the dense run of the same width, if
    there is one; causal, causal_tight: the loss when tokens decide by themselves over top-k's; accuracy: of the
    predictors; stochastic: that run's loss over that of the routed run of the same width.

    Raises:
        InputError: there is no dense or no routed run.
    """
    dense = [r for r in results if not r.setup["every"]]
    routed = [r for r in results if r.setup["every"] == 2 and r.setup["selection"] == "expert_choice"]
    noise = [r for r in results if r.setup["selection"] == "stochastic"]
    if not dense or not routed:
        raise InputError("a comparison needs a dense and a routed run")
    best = min(routed, key=lambda r: r.loss)
    same = next((r for r in dense if r.setup["width"] == best.setup["width"]), None)
    return {
        "loss": best.loss / min(r.loss for r in dense),
        "step": best.step_s / same.step_s if same else None,
        "flops": best.flops_per_step / same.flops_per_step if same else None,
        "stochastic": _over_learned(noise[0], routed) if noise else None,
        "causal": _over(best.causal, best.loss),
        "causal_tight": _over(best.causal_tight, best.loss),
        "accuracy": best.accuracy,
    }


def _over(loss: float | None, base: float) -> float | None:
    return None if loss is None else loss / base


def _over_learned(noise: RunResult, routed: Sequence[RunResult]) -> float | None:
    """What random choices cost, size and operations being equal."""
    same = next((r for r in routed if r.setup["width"] == noise.setup["width"]), None)
    return noise.loss / same.loss if same else None


def study_table(results: Sequence[RunResult]) -> list[tuple[str, ...]]:
    """One row of text per run, as ``HEADINGS`` says.

    >>> study_table([RunResult({"name": "dense"}, 1000, 10, 5, 0.25, loss=2.0)])
    [('dense', '1,000', '5', '250', '2.0000', '', '', '')]
    """
    return [
        (
            r.setup["name"],
            f"{r.parameters:,}",
            f"{r.steps:,}",
            f"{1000 * r.step_s:.0f}",
            f"{r.loss:.4f}",
            *("" if loss is None else f"{loss:.4f}" for loss in (r.causal, r.causal_tight)),
            "" if r.accuracy is None else f"{r.accuracy:.1%}",
        )
        for r in results
    ]


def study_markdown(results: Sequence[RunResult], run: Run) -> str:
    """The table and the verdict as markdown.

    Raises:
        InputError: there is no dense or no routed run.
    """
    how = f"{run.flops:.1e} operations each, {run.rows} rows of {run.sequence} bytes a step, seed {run.seed}."
    found = "; ".join(f"{name} {value:.4f}" for name, value in verdict(results).items() if value is not None)
    return f"{how}\n\n{grid(HEADINGS, study_table(results))}\n\nBest routed over best dense: {found}.\n"


def save_study_plot(results: Sequence[RunResult], path: Path) -> None:
    """Validation loss against operations, and at the end against the time of a step; written as PNG.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = require("matplotlib.figure", "bench").Figure(figsize=(11, 4.5), layout="constrained")
    curves, ends = figure.subplots(1, 2)
    for result in results:
        flops, losses = zip(*result.curve, strict=True)
        style: dict[str, Any] = {"linestyle": "--" if result.setup["every"] else "-", "label": result.setup["name"]}
        (line,) = curves.plot(flops, losses, marker=".", **style)
        ends.plot([1000 * result.step_s], [result.loss], "o", color=line.get_color())
        ends.annotate(result.setup["name"], (1000 * result.step_s, result.loss), fontsize="small")
    curves.set_xlabel("operations of training")
    curves.set_ylabel("validation loss, nats per byte")
    curves.legend(fontsize="small", frameon=False)
    ends.set_xlabel("milliseconds a step")
    figure.savefig(path, format="png", dpi=120)
