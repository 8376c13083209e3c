"""``modpass study isoflop --why``: how much it matters which tokens go through a routed block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

from modpass.bench.coverage_report import grid
from modpass.bench.study_loop import Progress
from modpass.bench.study_run import Run, RunResult, Setup, train
from modpass.bench.study_text import Corpus, load_text
from modpass.files import whole_file

__all__ = ["WHY", "WHY_HEADINGS", "WHY_QUICK", "WhyPlan", "paired", "why", "why_table"]

WHY_HEADINGS = ("blocks", "choice", "loss", "against learned", "at random", "by score", "skipped")
_CHOICES = {"expert_choice": "learned", "stochastic": "random", "none": "left out"}


@dataclass(frozen=True)
class WhyPlan:
    """Kinds of models, each trained from so many seeds for as many steps; names of kinds tell them apart."""

    kinds: tuple[Setup, ...]
    seeds: int
    run: Run


def _kinds(width: int, layers: int = 6, capacity: float = 0.125) -> tuple[Setup, ...]:
    """Every other block routed, by noise or left out; every block routed, or by noise: there is nothing else then."""
    same = {"width": width, "layers": layers, "capacity": capacity}
    half = (Setup(f"half-{s}", every=2, selection=s, **same) for s in _CHOICES)  # type: ignore[arg-type]
    every = (Setup(f"every-{s}", every=1, selection=s, **same) for s in ("expert_choice", "stochastic"))  # type: ignore[arg-type]
    return (*half, *every)


WHY = WhyPlan(_kinds(64), 2, Run(flops=0.0, rows=4, points=1, steps=600))
WHY_QUICK = WhyPlan(_kinds(32), 2, Run(flops=0.0, rows=4, sequence=128, points=2, validation_rows=8, steps=40))


def why(
    folder: Path, plan: WhyPlan = WHY, tell: Progress = lambda *_: None, text: bytes | None = None
) -> list[RunResult]:
    """Train each kind from each seed, and write ``why.json`` and ``why.md`` into ``folder``.

    Runs of one seed begin with the same dense weights and see the same rows in the same order, so that what parts
    two of them is the choice. Each run is kept as it goes; called again, it goes on where it was.

    Raises:
        StateError: the folder holds runs of another plan.
        MissingExtraError: the text is not installed.
    """
    corpus = Corpus.of(load_text() if text is None else text, plan.run.sequence)
    folder.mkdir(parents=True, exist_ok=True)
    setups = [Setup(**{**asdict(k), "name": f"{k.name}-{s}", "seed": s}) for s in range(plan.seeds) for k in plan.kinds]
    results = [train(setup, plan.run, corpus, folder, tell) for setup in setups]
    with whole_file(folder / "why.json") as temporary:
        record = {"run": asdict(plan.run), "results": [asdict(r) for r in results]}
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    with whole_file(folder / "why.md") as temporary:
        temporary.write_text(grid(WHY_HEADINGS, why_table(results)) + "\n", encoding="utf-8")
    return results


def paired(losses: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The mean of the differences, pair by pair, and its standard error (NaN for a single pair).

    >>> paired([2.0, 4.0], [1.0, 1.0])
    (2.0, 1.0)
    """
    found = [a - b for a, b in zip(losses, others, strict=True)]
    return mean(found), stdev(found) / sqrt(len(found)) if len(found) > 1 else float("nan")


def why_table(results: Sequence[RunResult]) -> list[tuple[str, ...]]:
    """One row of text per kind: the mean loss, and pair by pair what differs (nats per byte, with standard errors).

    "against learned" is another model trained from the same seed; the last columns are the same model, run otherwise
    after its training, against itself.
    """
    kinds: dict[tuple[int, str], list[RunResult]] = {}
    for result in results:
        kinds.setdefault((result.setup["every"], result.setup["selection"]), []).append(result)
    rows = []
    for (every, selection), runs in kinds.items():
        losses = [r.loss for r in runs]
        learned = kinds[every, "expert_choice"]
        against = "" if runs is learned else _difference(losses, [r.loss for r in learned])
        otherwise = (
            _difference([r.otherwise[w] for r in runs], losses) if w in runs[0].otherwise else ""
            for w in ("stochastic", "expert_choice", "none")
        )
        rows.append((_BLOCKS[every], _CHOICES[selection], f"{mean(losses):.4f}", against, *otherwise))
    return rows


_BLOCKS = {1: "every block", 2: "every other block"}


def _difference(losses: Sequence[float], others: Sequence[float]) -> str:
    found, error = paired(losses, others)
    return f"{found:+.4f} ± {error:.4f}"
