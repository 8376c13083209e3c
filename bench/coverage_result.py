"""The result of a coverage run: a row per model, kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from modpass.bench.coverage_stages import STAGES
from modpass.errors import StateError

__all__ = ["CoverageResult", "CoverageRow"]


@dataclass(frozen=True)
class CoverageRow:
    """How far one architecture came.

    passed: the stages it passed; failed: the first it did not (None: it passed all); outcome: "passed",
    "refused" (left alone, with a reason), "failed", "wrong", "crashed", "timed out" or "not installed".
    attends: whether its plain forward holds attention; inferred: whether modpass found its inputs; blocks: how many
    are routed; skipped: [name, reason] of each candidate that is not.
    """

    family: str
    name: str
    kind: str
    passed: tuple[str, ...] = ()
    failed: str | None = None
    outcome: str = "passed"
    reason: str = ""
    attends: bool | None = None
    inferred: bool | None = None
    blocks: int = 0
    skipped: tuple[tuple[str, str], ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    def reached(self, stage: str) -> bool:
        """Whether it passed ``stage``."""
        return stage in self.passed


@dataclass(frozen=True)
class CoverageResult:
    """The rows of a run, how far it went, and the versions it ran with."""

    rows: tuple[CoverageRow, ...]
    last: str = STAGES[-1]
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Every field as indented JSON.

        >>> CoverageResult.from_json(CoverageResult(()).to_json()).rows
        ()
        """
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> CoverageResult:
        """Read what ``to_json`` wrote.

        Raises:
            StateError: it is no such JSON.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            rows = tuple(_row(r) for r in data["rows"])
            return cls(rows, data["last"], data["versions"])
        except (ValueError, KeyError, TypeError) as e:
            raise StateError(f"this is no coverage result: {e}") from e


def _row(data: dict[str, Any]) -> CoverageRow:
    skipped = tuple((n, r) for n, r in data.pop("skipped"))
    return CoverageRow(**{**data, "passed": tuple(data["passed"]), "skipped": skipped})
