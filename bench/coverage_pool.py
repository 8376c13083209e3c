"""Each model in a process of its own, with limits on time and memory: none can stop the run.

The processes fork from a server that has imported everything once, so that a model costs no import.
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import resource
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from modpass.bench.coverage_result import CoverageRow

__all__ = ["Job", "run_jobs"]

MEMORY_BYTES = 6 * 2**30
# A limit on the clock would depend on what else runs; this many times as long it only ends what waits for ever.
PATIENCE = 4
STARTUP_S = 300.0  # on the clock, until a process says its first word: importing can be slow on a busy machine


@dataclass(frozen=True)
class Job:
    """A row to fill, and a function of a module that does the work: called with its arguments and ``report``."""

    row: CoverageRow
    work: Callable[..., None]
    arguments: tuple[Any, ...] = ()


@dataclass
class _Running:
    row: CoverageRow
    process: Any
    receiver: Connection
    log: Path
    patience: float
    deadline: float
    stage: str = "make"
    finished: bool = field(default=False)


def run_jobs(jobs: Sequence[Job], at_once: int, timeout_s: float, preload: Sequence[str] = ()) -> Iterator[CoverageRow]:
    """Run the jobs, ``at_once`` at a time, and yield each row when it is done, whatever became of its process.

    timeout_s: seconds of processor time for each; ``PATIENCE`` times as many on the clock, from its first report on.
    preload: modules that the server imports before it forks.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    waiting, running = list(jobs), list[_Running]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.pop(0)
                    running.append(_start(context, job, Path(folder, f"{len(waiting)}.log"), timeout_s))
                for one in _settle(running):
                    running.remove(one)
                    yield _finish(one, timeout_s)
        finally:
            for one in running:
                one.process.kill()
                one.process.join()


def _start(context: Any, job: Job, log: Path, timeout_s: float) -> _Running:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(job, timeout_s, sender, str(log)), daemon=True)
    process.start()
    sender.close()
    return _Running(job.row, process, receiver, log, PATIENCE * timeout_s, time.monotonic() + STARTUP_S)


def _settle(running: list[_Running]) -> list[_Running]:
    """Wait for events; return those that are done, dead or out of time."""
    left = max(0.0, min(one.deadline for one in running) - time.monotonic())
    ready = wait([one.receiver for one in running], timeout=left)
    for one in running:
        if one.receiver in ready:
            _receive(one)
    return [one for one in running if one.finished or time.monotonic() >= one.deadline]


def _receive(one: _Running) -> None:
    try:
        kind, value = one.receiver.recv()
    except EOFError:
        one.finished = True
        return
    if one.patience:
        one.deadline, one.patience = time.monotonic() + one.patience, 0.0
    if kind == "start":
        one.stage = value
    elif kind == "done":
        stage, seconds = value
        one.row = replace(one.row, passed=(*one.row.passed, stage), seconds={**one.row.seconds, stage: seconds})
    elif kind == "fact":
        name, found = value
        fact: dict[str, Any] = {name: tuple(map(tuple, found)) if name == "skipped" else found}
        one.row = replace(one.row, **fact)
    elif kind == "fail":
        stage, outcome, reason = value
        one.row = replace(one.row, failed=stage, outcome=outcome, reason=reason)


def _finish(one: _Running, timeout_s: float) -> CoverageRow:
    late = not one.finished
    if late:
        one.process.kill()
    one.process.join()
    one.receiver.close()
    if late or one.process.exitcode == -signal.SIGXCPU:
        reason = f"no end within {timeout_s:g} s of processor time"
        return replace(one.row, failed=one.stage, outcome="timed out", reason=reason)
    if one.process.exitcode and one.row.failed is None:
        reason = f"its process ended with {_code(one.process.exitcode)}: {_last_words(one.log)}"
        return replace(one.row, failed=one.stage, outcome="crashed", reason=reason)
    return one.row


def _code(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"code {code}"


def _last_words(log: Path) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if "what()" in line] or [line for line in lines if "error" in line.lower()]
    return (told or lines or ["it said nothing"])[-1][:300]


def _child(job: Job, timeout_s: float, sender: Connection, log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable(2)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    seconds = math.ceil(time.process_time() + timeout_s)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    warnings.simplefilter("ignore")
    job.work(*job.arguments, lambda kind, value: sender.send((kind, value)))
