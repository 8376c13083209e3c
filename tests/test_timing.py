"""Timing in turn, ratios and peak memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modpass.bench import Timing, interleave, ratio
from modpass.bench.memory import resident_growth
from modpass.errors import InputError


class Recorder:
    """Callables that write down who was called, and a clock that each call moves on."""

    def __init__(self, **seconds: float) -> None:
        self.now, self.calls = 0.0, list[str]()
        self.callables: dict[str, Callable[[], object]] = {n: self._call(n, s) for n, s in seconds.items()}

    def _call(self, name: str, seconds: float) -> Callable[[], object]:
        def call() -> None:
            self.calls.append(name)
            self.now += seconds

        return call

    def clock(self) -> float:
        return self.now


class TestInterleave:
    def test_the_order_flips_every_round(self) -> None:
        r = Recorder(dense=1.0, routed=1.0)
        interleave(r.callables, warmup=1, repeats=3, clock=r.clock)
        assert r.calls == ["dense", "routed", "dense", "routed", "routed", "dense", "dense", "routed"]

    def test_each_sample_is_the_time_of_its_own_call(self) -> None:
        r = Recorder(dense=4.0, routed=1.0)
        timings = interleave(r.callables, warmup=2, repeats=3, clock=r.clock)
        assert timings["dense"].samples == (4.0, 4.0, 4.0)
        assert timings["routed"].samples == (1.0, 1.0, 1.0)

    def test_it_goes_on_until_enough_seconds_are_spent(self) -> None:
        r = Recorder(dense=1.0, routed=0.5)
        seen: list[tuple[int, int]] = []
        interleave(r.callables, 0, 1, 6.0, lambda *counts: seen.append(counts), clock=r.clock)
        assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]

    def test_the_device_is_waited_for_before_each_reading_of_the_clock(self) -> None:
        events: list[str] = []

        def clock() -> float:
            events.append("clock")
            return 0.0

        call = {"a": lambda: events.append("call")}
        interleave(call, warmup=0, repeats=1, synchronize=lambda: events.append("wait"), clock=clock)
        assert events == ["wait", "clock", "call", "wait", "clock"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"callables": {}}, "there is nothing to time"),
            ({"callables": {"a": dict}, "repeats": 0}, "repeats must be at least 1"),
            ({"callables": {"a": dict}, "warmup": -1}, "warmup is -1"),
        ],
    )
    def test_what_measures_nothing_is_refused(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError, match=message):
            interleave(**arguments)


class TestRatio:
    def test_drift_of_the_machine_does_not_move_it(self) -> None:
        # Each round is slower than the one before; in each, routed takes half as long.
        drift = [1.0, 2.0, 4.0, 8.0, 16.0]
        found = ratio(Timing(tuple(2 * d for d in drift)), Timing(tuple(drift)))
        assert (found.value, found.q1, found.q3) == (2.0, 2.0, 2.0)

    def test_the_ratio_of_medians_is_told_apart(self) -> None:
        found = ratio(Timing((1.0, 10.0, 3.0)), Timing((1.0, 2.0, 3.0)))
        assert found.value == 1.0
        assert found.of_medians == 1.5

    def test_samples_of_different_rounds_are_refused(self) -> None:
        with pytest.raises(InputError, match="of 1 and 2 samples are not of the same rounds"):
            ratio(Timing((1.0,)), Timing((1.0, 2.0)))

    def test_quartiles_of_a_timing(self) -> None:
        timing = Timing((5.0, 1.0, 4.0, 2.0, 3.0))
        assert (timing.q1, timing.median, timing.q3) == (2.0, 3.0, 4.0)
        assert Timing((7.0,)).q1 == Timing((7.0,)).q3 == 7.0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory needs Linux's /proc")
def test_peak_memory_sees_what_a_call_has_already_freed() -> None:
    def call() -> None:
        for _ in range(8):
            torch.ones(16 << 20)

    grown = resident_growth(call)
    assert grown is not None
    assert 60 << 20 < grown < 256 << 20  # one or two of the eight at a time: an allocator may keep a freed one
