"""Times of several callables taken in turn, so that drift of the machine falls on all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from modpass.errors import InputError

__all__ = ["Ratio", "Timing", "interleave", "ratio", "synchronize_gpu"]


@dataclass(frozen=True)
class Timing:
    """Seconds of each call, in the order in which they were measured.

    >>> Timing((3.0, 1.0, 2.0)).median
    2.0
    """

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Half of the calls took longer, in seconds."""
        return statistics.median(self.samples)

    @property
    def q1(self) -> float:
        """A quarter of the calls took less, in seconds."""
        return self._quartiles[0]

    @property
    def q3(self) -> float:
        """A quarter of the calls took longer, in seconds."""
        return self._quartiles[2]

    def percentile(self, percent: int) -> float:
        """So many percent of the calls took no longer, in seconds; between two samples, on the line between them.

        >>> Timing((1.0, 2.0, 3.0, 4.0, 5.0)).percentile(90)
        4.6
        """
        place = (len(self.samples) - 1) * percent / 100
        ordered, below = sorted(self.samples), int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    @cached_property
    def _quartiles(self) -> tuple[float, float, float]:
        return _quartiles(self.samples)


@dataclass(frozen=True)
class Ratio:
    """How many times faster the second is than the first.

    value: median of the ratios of each round, which slow drift of the machine does not move; q1, q3: its
    quartiles; of_medians: the ratio of the two medians, for comparison.
    """

    value: float
    q1: float
    q3: float
    of_medians: float


def ratio(first: Timing, second: Timing) -> Ratio:
    """Compare two timings of one :func:`interleave`: samples at the same place are of the same round.

    Raises:
        InputError: they differ in their number of samples.

    >>> ratio(Timing((4.0, 8.0)), Timing((2.0, 2.0))).value
    3.0
    """
    if len(first.samples) != len(second.samples):
        raise InputError(
            f"timings of {len(first.samples)} and {len(second.samples)} samples are not of the same rounds; "
            "compare those of one interleave()"
        )
    rounds = tuple(a / b for a, b in zip(first.samples, second.samples, strict=True))
    q1, value, q3 = _quartiles(rounds)
    return Ratio(value, q1, q3, first.median / second.median)


def interleave(
    callables: Mapping[str, Callable[[], object]],
    warmup: int = 3,
    repeats: int = 20,
    min_seconds: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
    synchronize: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Call each once per round, in an order that flips every round, and time every call.

    ``torch.utils.benchmark.Timer`` does not fit: it times one callable, and warms up before each sample.

    Args:
        callables: what to time, by name.
        warmup: rounds whose times are dropped.
        repeats: rounds to measure at least.
        min_seconds: go on until so much time has passed since the first measured round.
        progress: called as (rounds done, rounds expected) after each measured round.
        synchronize: waits for the device; called before each reading of the clock.
        clock: seconds; monotonic.

    Raises:
        InputError: nothing to time, no round to measure, or a negative number.

    >>> ticks = iter(range(100))
    >>> interleave({"a": list, "b": dict}, 0, 2, clock=lambda: float(next(ticks)))["b"].samples
    (1.0, 1.0)
    """
    if not callables:
        raise InputError("there is nothing to time; give at least one callable")
    if warmup < 0 or repeats < 1 or min_seconds < 0:
        raise InputError(
            f"warmup is {warmup}, repeats {repeats}, min_seconds {min_seconds}; repeats must be at least 1, "
            "the others 0 or more"
        )
    wait = synchronize or (lambda: None)
    order = list(callables)
    samples: dict[str, list[float]] = {name: [] for name in order}

    def measure(name: str) -> float:
        wait()
        start = clock()
        callables[name]()
        wait()
        return clock() - start

    for _ in range(warmup):
        for name in order:
            measure(name)
    spent, done = 0.0, 0
    while done < repeats or spent < min_seconds:
        for name in order if done % 2 == 0 else reversed(order):
            samples[name].append(measure(name))
            spent += samples[name][-1]
        done += 1
        if progress is not None:
            progress(done, max(repeats, _expected(done, spent, min_seconds)))
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def synchronize_gpu() -> None:
    """Wait for all work on the GPU.

    >>> synchronize_gpu() if torch.cuda.is_available() else None
    """
    torch.cuda.synchronize()


def _expected(done: int, spent: float, min_seconds: float) -> int:
    """Rounds until ``min_seconds`` are spent, at the pace so far."""
    return max(done, round(done * min_seconds / spent)) if spent else done


def _quartiles(values: tuple[float, ...]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    q1, q2, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return q1, q2, q3
