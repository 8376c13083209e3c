"""What changed between two coverage results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from modpass.bench.coverage_result import CoverageResult, CoverageRow
from modpass.bench.coverage_stages import STAGES

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True)
class Comparison:
    """What changed from one result to the next, each as ``"family/name: before -> after"``."""

    gained: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [(n, getattr(self, n)) for n in ("gained", "lost", "changed", "added", "removed")]
        lines = ["\n  ".join([f"{name} ({len(rows)})", *rows]) for name, rows in parts if rows]
        return "\n".join(lines) or "nothing changed"


def compare(old: CoverageResult, new: CoverageResult) -> Comparison:
    """Which models come further than they did, less far, or stop where they did for another reason.

    Two runs that stopped after different stages are compared up to the earlier.

    >>> str(compare(CoverageResult(()), CoverageResult(())))
    'nothing changed'
    """
    before, after = ({r.key: r for r in result.rows} for result in (old, new))
    limit = min(STAGES.index(old.last), STAGES.index(new.last)) + 1
    found: dict[str, list[str]] = {"gained": [], "lost": [], "changed": []}
    for key in before.keys() & after.keys():
        a, b = _progress(before[key], limit), _progress(after[key], limit)
        kind = "gained" if b > a else "lost" if b < a else "changed"
        if a != b or (a[0] < limit and _end(before[key]) != _end(after[key])):
            found[kind].append(f"{'/'.join(key)}: {_end(before[key])} -> {_end(after[key])}")
    gained, lost, changed = (tuple(sorted(found[k])) for k in ("gained", "lost", "changed"))
    added, removed = _names(after.keys() - before.keys()), _names(before.keys() - after.keys())
    return Comparison(gained, lost, changed, added, removed)


def _progress(row: CoverageRow, limit: int) -> tuple[int, bool]:
    """How many stages it passed; whole blocks are more than a branch of each."""
    return min(len(row.passed), limit), row.parts not in ("mlp", "attention")


def _end(row: CoverageRow) -> str:
    branch = f" by its {row.parts} branches only" if row.parts in ("mlp", "attention") else ""
    return f"passed{branch}" if row.failed is None else f"{row.outcome} at {row.failed}: {row.reason}"


def _names(keys: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(sorted("/".join(k) for k in keys))
