"""The result of a coverage run: a row per model, kept as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import modpass
from modpass.bench.coverage_stages import STAGES
from modpass.errors import StateError

__all__ = ["OUTCOMES", "CoverageResult", "CoverageRow", "code_digest"]

OUTCOMES = ("passed", "refused", "failed", "wrong", "crashed", "timed out", "not installed")


@cache
def code_digest() -> str:
    """What tells one state of the pass and its exporters from another: a digest of their source files.

    >>> len(code_digest())
    12
    """
    root = Path(modpass.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(f for folder in ("", "decode", "exporters") for f in (root / folder).glob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class CoverageRow:
    """How far one architecture came.

    passed: the stages it passed; failed: the first it did not (None: it passed all); outcome: "passed",
    "refused" (left alone, with a reason), "failed", "wrong", "crashed", "timed out" or "not installed".
    attends: whether its plain forward holds attention; inferred: whether modpass found its inputs; blocks: how many
    are routed; parts: what of each, "block", "mlp" or "attention" ("": none is); skipped: [name, reason] of each
    candidate that is not; code: ``code_digest()`` when it was measured.
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
    code: str = ""
    parts: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """The family and the name, which tell one row from another."""
        return self.family, self.name

    def reached(self, stage: str) -> bool:
        """Whether it passed ``stage``."""
        return stage in self.passed


@dataclass(frozen=True)
class CoverageResult:
    """The rows of a run, how far it went, the versions it ran with, and the names of all models of each family."""

    rows: tuple[CoverageRow, ...]
    last: str = STAGES[-1]
    versions: Mapping[str, str] = field(default_factory=dict)
    registered: Mapping[str, Sequence[str]] = field(default_factory=dict)

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
            return cls(rows, data["last"], data["versions"], data.get("registered", {}))
        except (ValueError, KeyError, TypeError) as e:
            raise StateError(f"this is no coverage result: {e}") from e


def _row(data: dict[str, Any]) -> CoverageRow:
    skipped = tuple((n, r) for n, r in data.pop("skipped"))
    data.setdefault("parts", "block" if data.get("blocks") else "")  # a record from before branches were tried
    return CoverageRow(**{**data, "passed": tuple(data["passed"]), "skipped": skipped})
