"""What a study found: the verdict, its table, and the plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
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
    predictors; stochastic: mean loss of the runs that choose by noise over that of the learned runs of the same width,
    all seeds; stochastic_least: their best over the learned runs' worst, above 1 where no seed turns it round.

    Raises:
        InputError: there is no dense or no routed run.
    """
    dense = [r for r in results if not r.setup["every"]]
    learned = [r for r in results if r.setup["every"] == 2 and r.setup["selection"] == "expert_choice"]
    routed = [r for r in learned if not r.setup["seed"]]
    if not dense or not routed:
        raise InputError("a comparison needs a dense and a routed run")
    best = min(routed, key=lambda r: r.loss)
    same = next((r for r in dense if r.setup["width"] == best.setup["width"]), None)
    return {
        "loss": best.loss / min(r.loss for r in dense),
        "step": best.step_s / same.step_s if same else None,
        "flops": best.flops_per_step / same.flops_per_step if same else None,
        **_over_learned([r for r in results if r.setup["selection"] == "stochastic"], learned),
        "causal": _over(best.causal, best.loss),
        "causal_tight": _over(best.causal_tight, best.loss),
        "accuracy": best.accuracy,
    }


def _over(loss: float | None, base: float) -> float | None:
    return None if loss is None else loss / base


def _over_learned(noise: Sequence[RunResult], learned: Sequence[RunResult]) -> dict[str, float | None]:
    """What random choices cost, size and operations being equal."""
    widths = {r.setup["width"] for r in noise}
    random, chosen = [r.loss for r in noise], [r.loss for r in learned if r.setup["width"] in widths]
    if not random or not chosen:
        return {"stochastic": None, "stochastic_least": None}
    return {"stochastic": mean(random) / mean(chosen), "stochastic_least": min(random) / max(chosen)}


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

    The pictures end a little above where most runs begin to differ; the table names the rest.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = require("matplotlib.figure", "bench").Figure(figsize=(11, 4.5), layout="constrained")
    curves, ends = figure.subplots(1, 2)
    for result in results:
        flops, losses = zip(*result.curve, strict=True)
        style: dict[str, Any] = {"linestyle": "--" if result.setup["every"] else "-", "label": result.setup["name"]}
        (line,) = curves.plot(flops, losses, **style)
        marker = "s" if result.setup["every"] else "o"
        ends.plot([1000 * result.step_s], [result.loss], marker, color=line.get_color())
    least = min(r.loss for r in results)
    curves.set_ylim(0.98 * least, 1.5 * least)
    ends.set_ylim(0.98 * least, 1.12 * least)
    curves.set_xlabel("operations of training")
    curves.set_ylabel("validation loss, nats per byte")
    ends.set_xlabel("milliseconds a step (square: routed)")
    curves.legend(fontsize="small", frameon=False)
    figure.savefig(path, format="png", dpi=100)
