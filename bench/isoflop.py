"""``modpass study isoflop``: dense and Mixture-of-Depths decoders trained to the same number of operations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from modpass.bench.study_loop import Training
from modpass.bench.study_report import save_study_plot, study_markdown, verdict
from modpass.bench.study_run import Run, RunResult, Setup, train
from modpass.bench.study_text import Corpus, load_text
from modpass.bench.timing import interleave
from modpass.errors import require
from modpass.files import whole_file

__all__ = ["FULL", "QUICK", "Plan", "isoflop"]

TIMED_STEPS = 15


@dataclass(frozen=True)
class Plan:
    """The setups, and how each is trained."""

    setups: tuple[Setup, ...]
    run: Run


def _setups(dense: Sequence[int], routed: Sequence[int], again: Sequence[int] = ()) -> tuple[Setup, ...]:
    """Dense and routed runs of these widths; the smallest routed width also with every block, and with noise.

    again: further seeds of that width, learned and with noise, to tell a difference from chance.
    """
    small = min(routed)
    return (
        *(Setup(f"dense-{width}", width) for width in dense),
        *(Setup(f"mod-{width}", width, every=2) for width in routed),
        Setup(f"mod-every-block-{small}", small, every=1),
        *(Setup(f"mod-{small}-seed-{seed}", small, every=2, seed=seed) for seed in again),
        Setup(f"stochastic-{small}", small, every=2, selection="stochastic"),
        *(Setup(f"stochastic-{small}-seed-{s}", small, every=2, selection="stochastic", seed=s) for s in again),
    )


FULL = Plan(_setups((48, 64, 96), (64, 96), (1, 2)), Run(flops=1e13, rows=8))
QUICK = Plan(_setups((64, 96), (64, 96)), Run(flops=2e11, rows=4, sequence=128, points=4))


def isoflop(
    folder: Path,
    plan: Plan = FULL,
    tell: Callable[[str, int, int], None] = lambda *_: None,
    text: bytes | None = None,
) -> list[RunResult]:
    """Train every setup of the plan, and write ``isoflop.json``, ``.md`` and ``.png`` into ``folder``.

    Each run is kept there as it goes; called again, it goes on where it was.

    Raises:
        StateError: the folder holds runs of another plan.
        MissingExtraError: the text, or matplotlib, is not installed.
    """
    corpus = Corpus.of(load_text() if text is None else text, plan.run.sequence)
    require("matplotlib.figure", "bench")
    folder.mkdir(parents=True, exist_ok=True)
    results = [train(setup, plan.run, corpus, folder, tell) for setup in plan.setups]
    _time_steps(results, plan, corpus)
    record = {"run": asdict(plan.run), "results": [asdict(r) for r in results], "verdict": verdict(results)}
    with whole_file(folder / "isoflop.json") as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n")
    with whole_file(folder / "isoflop.md") as temporary:
        temporary.write_text(study_markdown(results, plan.run), encoding="utf-8")
    with whole_file(folder / "isoflop.png") as temporary:
        save_study_plot(results, temporary)
    return results


def _time_steps(results: Sequence[RunResult], plan: Plan, corpus: Corpus) -> None:
    """Fill in the seconds of a training step, all setups in turn."""
    steps = {s.name: Training(s, plan.run, corpus).learn for s in plan.setups}
    times = interleave(steps, warmup=2, repeats=TIMED_STEPS)
    for result in results:
        result.step_s = times[result.setup["name"]].median
