"""Run a TensorRT build under a progress bar, and let Ctrl-C cancel it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from modpass.exporters.trt_api import TensorRT

__all__ = ["build"]


def build(trt: TensorRT, builder: Any, network: Any, config: Any, progress: bool) -> Any:
    """Build in a thread, so that Ctrl-C reaches Python and cancels the build at TensorRT's next step.

    Returns what TensorRT returns: a serialized engine, or None where it failed.

    Raises:
        KeyboardInterrupt: after TensorRT has stopped.
    """
    go, cancelled = threading.Event(), threading.Event()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    with _bar(progress) as bar, ThreadPoolExecutor(1) as pool:
        monitor = _monitor(trt.module, bar, cancelled)

        def run() -> Any:
            go.wait()  # until the pool knows this thread, for it must wait for it on every way out
            if cancelled.is_set():
                return None
            if device is not None:
                torch.cuda.set_device(device)  # the current device belongs to a thread
            # set here, so that the monitor lives as long as the build, which needs it
            config.progress_monitor = monitor
            return builder.build_serialized_network(network, config)

        try:
            future: Future[Any] = pool.submit(run)
            go.set()
            # in short waits: Python handles a signal that another thread received only when this one runs
            while not wait([future], timeout=0.1).done:
                pass
            return future.result()
        except KeyboardInterrupt:
            cancelled.set()
            go.set()
            raise  # leaving the pool waits until TensorRT has stopped


@contextmanager
def _bar(show: bool) -> Iterator[Progress | None]:
    if not show:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield bar


def _monitor(module: Any, bar: Progress | None, cancelled: threading.Event) -> Any:
    class Monitor(module.IProgressMonitor):  # type: ignore[misc]
        """Called from TensorRT's threads; nothing may be raised into them."""

        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)
            self.tasks: dict[str, TaskID] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if bar is not None:
                self.tasks[phase_name] = bar.add_task(phase_name, total=num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if bar is not None and phase_name in self.tasks:
                bar.update(self.tasks[phase_name], completed=step + 1)
            return not cancelled.is_set()

        def phase_finish(self, phase_name: str) -> None:
            if bar is not None and phase_name in self.tasks:
                bar.remove_task(self.tasks.pop(phase_name))

    return Monitor()
