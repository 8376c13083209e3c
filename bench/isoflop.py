"""``modpass study isoflop``: dense and Mixture-of-Depths decoders trained to the same number of operations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modpass.bench.study_run import Run, RunResult, Setup, train
from modpass.bench.study_text import Corpus, load_text
from modpass.errors import InputError, require
from modpass.files import whole_file

__all__ = ["FULL", "QUICK", "Plan", "isoflop", "save_study_plot", "study_table", "verdict"]


@dataclass(frozen=True)
class Plan:
    """The setups, and how each is trained."""

    setups: tuple[Setup, ...]
    run: Run


def _setups(dense: Sequence[int], routed: int, wider: int) -> tuple[Setup, ...]:
    return (
        *(Setup(f"dense-{width}", width) for width in dense),
        *(Setup(f"mod-{width}", width, every=2) for width in (routed, wider)),
        Setup(f"mod-every-block-{wider}", wider, every=1),
        Setup(f"stochastic-{wider}", wider, every=2, selection="stochastic"),
    )


FULL = Plan(_setups((64, 96, 128), 96, 128), Run(flops=1.5e13, rows=8))
QUICK = Plan(_setups((64, 96), 64, 96), Run(flops=2e11, rows=4, sequence=128, points=4))


def isoflop(
    folder: Path,
    plan: Plan = FULL,
    tell: Callable[[str, int, int], None] = lambda *_: None,
    text: bytes | None = None,
) -> list[RunResult]:
    """Train every setup of the plan, and write ``isoflop.json`` and ``isoflop.png`` into ``folder``.

    Each run is kept there as it goes; called again, it goes on where it was.

    Raises:
        StateError: the folder holds runs of another plan.
        MissingExtraError: the text, or matplotlib, is not installed.
    """
    corpus = Corpus.of(load_text() if text is None else text, plan.run.sequence)
    require("matplotlib.figure", "bench")
    folder.mkdir(parents=True, exist_ok=True)
    results = [train(setup, plan.run, corpus, folder, tell) for setup in plan.setups]
    record = {"run": asdict(plan.run), "results": [asdict(r) for r in results], "verdict": verdict(results)}
    with whole_file(folder / "isoflop.json") as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n")
    with whole_file(folder / "isoflop.png") as temporary:
        save_study_plot(results, temporary)
    return results


def verdict(results: Sequence[RunResult]) -> dict[str, float | None]:
    """The best routed run (every other block) against the best dense one.

    loss: over the best dense one's; step, flops: of one step, over those of the dense run of the same width, if
    there is one; causal: the loss when tokens decide by themselves over top-k's; accuracy: of the predictors;
    stochastic: that run's loss over that of the routed run of the same width.

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
        "causal": best.causal / best.loss if best.causal is not None else None,
        "accuracy": best.accuracy,
    }


def _over_learned(noise: RunResult, routed: Sequence[RunResult]) -> float | None:
    """What random choices cost, size and operations being equal."""
    same = next((r for r in routed if r.setup["width"] == noise.setup["width"]), None)
    return noise.loss / same.loss if same else None


def study_table(results: Sequence[RunResult]) -> list[tuple[str, ...]]:
    """One row of text per run: name, parameters, steps, seconds a step, losses, accuracy.

    >>> study_table([RunResult({"name": "dense"}, 1000, 10, 5, 0.25, loss=2.0)])
    [('dense', '1,000', '5', '0.250', '2.0000', '', '')]
    """
    return [
        (
            r.setup["name"],
            f"{r.parameters:,}",
            f"{r.steps:,}",
            f"{r.step_s:.3f}",
            f"{r.loss:.4f}",
            "" if r.causal is None else f"{r.causal:.4f}",
            "" if r.accuracy is None else f"{r.accuracy:.1%}",
        )
        for r in results
    ]


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
