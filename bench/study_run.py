"""One training run of a study, to a budget of operations; goes on after an interruption as if there had been none."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from modpass.bench.study_loop import Progress, Training, same_settings
from modpass.bench.study_setup import Run, RunResult, Setup
from modpass.bench.study_text import Corpus
from modpass.files import whole_file

__all__ = ["Run", "RunResult", "Setup", "train"]


def train(setup: Setup, run: Run, corpus: Corpus, folder: Path, tell: Progress) -> RunResult:
    """Train to the end and return the result, from ``folder`` where an earlier call got so far.

    Raises:
        StateError: the folder holds a run of other settings.
    """
    finished, midway = folder / f"{setup.name}.json", folder / f"{setup.name}.pt"
    settings = {"setup": asdict(setup), "run": asdict(run)}
    if finished.exists():
        found = json.loads(finished.read_text(encoding="utf-8"))
        same_settings(found["settings"], settings, finished)
        return RunResult(**found["result"])
    result = Training(setup, run, corpus).to_the_end(midway, settings, tell)
    with whole_file(finished) as temporary:
        temporary.write_text(json.dumps({"settings": settings, "result": asdict(result)}, indent=2) + "\n")
    midway.unlink(missing_ok=True)
    return result
