"""A coverage result as markdown, and what changed between two of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from modpass.bench.coverage_result import CoverageResult, CoverageRow
from modpass.bench.coverage_stages import STAGES

__all__ = ["Comparison", "compare", "render"]

_MEANING = {
    "make": "a tiny random model is made from the architecture's own configuration",
    "run": "its plain forward runs",
    "trace": "`torch.export` traces it",
    "blocks": "blocks are found, and at least one is routed",
    "unit": "weight 1 and capacity 1 equal the dense model (1e-4)",
    "reference": "capacity 0.25 equals the per-token reference (1e-4)",
    "onnx": "it becomes ONNX in which every dim is an integer",
    "onnxruntime": "ONNX Runtime agrees (1e-4), token choices included",
    "tensorrt": "TensorRT-RTX builds it",
}


def render(result: CoverageResult) -> str:
    """The whole result as markdown: counts per family and stage, then a row per architecture.

    >>> render(CoverageResult(())).splitlines()[0]
    '# Coverage'
    """
    stages = STAGES[: STAGES.index(result.last) + 1]
    families = list(dict.fromkeys(r.family for r in result.rows))
    made_with = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    counts = [_counts(f, [r for r in result.rows if r.family == f], stages) for f in families]
    parts = [
        "# Coverage",
        f"Made by `modpass coverage`{f' with {made_with}' if made_with else ''}.",
        _grid(("family", *stages, "of those that trace and attend"), counts),
        "\n".join(f"- **{s}**: {_MEANING[s]}" for s in stages),
        _LEGEND,
    ]
    for family in families:
        rows = [r for r in result.rows if r.family == family]
        parts += [
            f"## {family}",
            _grid(("outcome", "models"), _outcomes(rows)),
            _grid(("model", "class", "routed", "stops at", "outcome", "reason"), map(_cells, rows)),
        ]
    return "\n\n".join(parts) + "\n"


_LEGEND = (
    'A model counts at a stage if it passed that stage and all before. "Attend": its plain forward holds '
    'attention; convolutional and recurrent models have nothing to route. "Routed": blocks routed, of those '
    'found. "Refused" is an answer with a reason; "wrong" would be a model that computes something else.'
)


def _counts(family: str, rows: Sequence[CoverageRow], stages: Sequence[str]) -> tuple[str, ...]:
    counts = [str(sum(r.reached(s) for r in rows)) for s in stages]
    able = [r for r in rows if r.reached("trace") and r.attends]
    done = sum(r.failed is None for r in able)
    return (family, *counts, f"{done} of {len(able)} ({done / len(able):.0%})" if able else "none")


def _outcomes(rows: Iterable[CoverageRow]) -> list[tuple[str, str]]:
    return [(outcome, str(n)) for outcome, n in Counter(r.outcome for r in rows).most_common()]


def _cells(row: CoverageRow) -> tuple[str, ...]:
    found = row.blocks + len(row.skipped)
    reason = row.reason or (f"{row.skipped[0][0]} is not routed: {row.skipped[0][1]}" if row.skipped else "")
    routed = f"{row.blocks} of {found}" if found else "–"
    return (row.name, row.kind, routed, row.failed or "", row.outcome, reason)


def _grid(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    clean = ([" ".join(cell.replace("|", "\\|").split()) for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in clean)


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
    before, after = ({(r.family, r.name): r for r in result.rows} for result in (old, new))
    limit = min(STAGES.index(old.last), STAGES.index(new.last)) + 1
    found: dict[str, list[str]] = {"gained": [], "lost": [], "changed": []}
    for key in before.keys() & after.keys():
        a, b = _progress(before[key], limit), _progress(after[key], limit)
        kind = "gained" if b > a else "lost" if b < a else "changed"
        if a != b or (a < limit and _end(before[key]) != _end(after[key])):
            found[kind].append(f"{'/'.join(key)}: {_end(before[key])} -> {_end(after[key])}")
    gained, lost, changed = (tuple(sorted(found[k])) for k in ("gained", "lost", "changed"))
    added, removed = _names(after.keys() - before.keys()), _names(before.keys() - after.keys())
    return Comparison(gained, lost, changed, added, removed)


def _progress(row: CoverageRow, limit: int) -> int:
    return min(len(row.passed), limit)


def _end(row: CoverageRow) -> str:
    return "passed" if row.failed is None else f"{row.outcome} at {row.failed}: {row.reason}"


def _names(keys: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(sorted("/".join(k) for k in keys))
