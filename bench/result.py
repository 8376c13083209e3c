"""What a benchmark found, as data: one row per runner, also for those that could not run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from modpass.bench.cases import Case
from modpass.bench.flops import FlopCount
from modpass.bench.hardware import Hardware
from modpass.bench.timing import Ratio, Timing, ratio
from modpass.errors import InputError, StateError

__all__ = ["SCHEMA", "Measurement", "Peer", "Result", "Row"]

SCHEMA = 1


@dataclass(frozen=True)
class Measurement:
    """One variant under one runner: its times, and by how many bytes memory rose during a call at most.

    blocks: seconds of one profiled call in each block, and outside of them under ``""``; empty if not profiled.
    """

    timing: Timing
    peak_bytes: int | None = None
    blocks: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """What another tool made of the dense model, measured in turn with ours; ``reason``: why it was not."""

    name: str
    measurement: Measurement | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Row:
    """One runner. ``reason`` says why it was skipped or how it failed; both keep their row."""

    runner: str
    status: Literal["measured", "skipped", "failed"]
    dense: Measurement | None = None
    routed: Measurement | None = None
    reason: str | None = None
    peers: tuple[Peer, ...] = ()

    @property
    def ratio(self) -> Ratio | None:
        """How many times faster routed is than dense; None if it was not measured."""
        if self.dense is None or self.routed is None:
            return None
        return ratio(self.dense.timing, self.routed.timing)

    def over(self, peer: Peer) -> Ratio | None:
        """How many times faster our dense is than a peer's; None if one was not measured."""
        if self.dense is None or peer.measurement is None:
            return None
        return ratio(peer.measurement.timing, self.dense.timing)


@dataclass(frozen=True)
class Result:
    """A whole benchmark: case, rows, counted operations, and what it ran on.

    ``name`` is the model's name in reports, ``inputs`` the shape of each input.
    """

    case: Case
    name: str
    rows: tuple[Row, ...]
    dense_flops: FlopCount
    routed_flops: FlopCount
    inputs: Mapping[str, tuple[int, ...]]
    hardware: Hardware
    versions: Mapping[str, str] = field(default_factory=dict)
    command: str = ""

    @property
    def ideal(self) -> float:
        """The speed-up that counted operations allow: dense over routed."""
        return self.dense_flops.total / self.routed_flops.total

    def efficiency(self, row: Row) -> float | None:
        """The share of the ideal speed-up that a row reached; None if it was not measured."""
        return None if row.ratio is None else row.ratio.value / self.ideal

    def row(self, runner: str) -> Row | None:
        """The row of a runner; None if there is none."""
        return next((row for row in self.rows if row.runner == runner), None)

    def to_dict(self) -> dict[str, Any]:
        """Everything, with all samples, as plain values; the derived figures are there for other readers."""
        data = {"schema": SCHEMA, "ideal": self.ideal, **asdict(self)}
        for raw, row in zip(data["rows"], self.rows, strict=True):
            raw["ratio"] = None if row.ratio is None else asdict(row.ratio)
            raw["efficiency"] = self.efficiency(row)
            for variant in ("dense", "routed"):
                if (found := getattr(row, variant)) is not None:
                    raw[variant]["percentiles"] = {f"p{p}": found.timing.percentile(p) for p in (50, 90, 99)}
        return data

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON.

        Raises:
            StateError: a value has no place in JSON.
        """
        try:
            return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        except (TypeError, ValueError) as e:
            raise StateError(f"the benchmark of '{self.name}' cannot be written as JSON: {e}") from e

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Read :meth:`to_json` back.

        Raises:
            StateError: it is not such JSON, or of another schema.
        """
        try:
            raw = json.loads(text)
        except ValueError as e:
            raise StateError(f"this is not the JSON of a benchmark: {e}") from e
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Any) -> Result:
        """Read :meth:`to_dict` back.

        Raises:
            StateError: these are no such values, or of another schema.
        """
        try:
            schema = raw["schema"]
        except (TypeError, LookupError) as e:
            raise StateError(f"this is not the JSON of a benchmark: {e}") from e
        if schema != SCHEMA:
            raise StateError(f"this benchmark has schema {schema!r}, and {SCHEMA} is read here; run it again")
        try:
            return _result(raw)
        except (TypeError, LookupError, AttributeError, ValueError, InputError) as e:
            raise StateError(f"this benchmark misses a field or has a wrong one: {e}") from e


def _result(raw: dict[str, Any]) -> Result:
    return Result(
        case=Case(**raw["case"]),
        name=raw["name"],
        rows=tuple(map(_row, raw["rows"])),
        dense_flops=FlopCount(**raw["dense_flops"]),
        routed_flops=FlopCount(**raw["routed_flops"]),
        inputs={name: tuple(shape) for name, shape in raw["inputs"].items()},
        hardware=Hardware(**raw["hardware"]),
        versions=raw["versions"],
        command=raw["command"],
    )


def _row(raw: dict[str, Any]) -> Row:
    dense, routed = (_measurement(raw[variant]) for variant in ("dense", "routed"))
    peers = (Peer(p["name"], _measurement(p["measurement"]), p["reason"]) for p in raw.get("peers", ()))
    if raw["status"] == "measured":
        if dense is None or routed is None:
            raise ValueError(f"the row of '{raw['runner']}' is measured and has no times")
        if len(dense.timing.samples) != len(routed.timing.samples):
            raise ValueError(f"the row of '{raw['runner']}' has more times of one variant than of the other")
    return Row(raw["runner"], raw["status"], dense, routed, raw["reason"], tuple(peers))


def _measurement(raw: dict[str, Any] | None) -> Measurement | None:
    if raw is None:
        return None
    samples = tuple(raw["timing"]["samples"])
    if not samples or not all(isinstance(s, int | float) and 0 < s < math.inf for s in samples):
        raise ValueError(f"times are seconds above 0, and these are {list(samples)[:3]}")
    return Measurement(Timing(samples), raw["peak_bytes"], raw.get("blocks", {}))
