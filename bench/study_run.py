"""One training run of a study, to a budget of operations; goes on after an interruption as if there had been none."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from modpass.bench.study_kept import kept
from modpass.bench.study_loop import Progress, Training
from modpass.bench.study_setup import Run, RunResult, Setup
from modpass.bench.study_text import Corpus

__all__ = ["Run", "RunResult", "Setup", "train"]


def train(setup: Setup, run: Run, corpus: Corpus, folder: Path, tell: Progress) -> RunResult:
    """Train to the end and return the result, from ``folder`` where an earlier call got so far.

    Raises:
        StateError: the folder holds a run of other settings.
    """
    midway = folder / f"{setup.name}.pt"
    settings = {"setup": asdict(setup), "run": asdict(run)}

    def whole() -> dict[str, Any]:
        return asdict(Training(setup, run, corpus).to_the_end(midway, settings, tell))

    result = RunResult(**kept(folder / f"{setup.name}.json", settings, whole))
    midway.unlink(missing_ok=True)
    return result
