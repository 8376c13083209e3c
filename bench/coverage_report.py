"""A coverage result as markdown: counts, the figures in two readings, and a row per architecture."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from modpass.bench.coverage_result import CoverageResult, CoverageRow
from modpass.bench.coverage_stages import STAGES

__all__ = ["by_construction", "counts", "grid", "origin", "render"]

_MEANING = {
    "make": "a tiny random model is made from the architecture's own configuration",
    "run": "its plain forward runs",
    "trace": "`torch.export` traces it",
    "blocks": "blocks are found, and at least one is routed, whole or by a branch",
    "unit": "weight 1 and capacity 1 equal the dense model (1e-4)",
    "reference": "capacity 0.25 equals the per-token reference (1e-4)",
    "onnx": "it becomes ONNX in which every dim is an integer",
    "onnxruntime": "ONNX Runtime agrees (1e-4), token choices included",
    "tensorrt": "TensorRT-RTX builds it",
}
# Why a model mixes tokens beside attention by its very construction, told by the reason it was refused for.
_CONSTRUCTION = {
    "no attention": r"no attention in it",
    "convolution over tokens": r"convolves over tokens|conv\w*\.\w+ makes a dim of",
    "recurrence over tokens": r"picks single tokens|(cumsum|cumprod|logcumsumexp)\S* runs along",
    "windows or pooled keys": r"windows or pooled keys",
    "pooling over tokens": r"(softmax|sum|mean|amax|max)\S* runs along the sequence",
}
_LEGEND = (
    'A model counts at a stage if it passed that stage and all before. "Routed": blocks routed, of those found; a '
    "model with one routed block or more goes on, and the reason given is then that of its first block that is not "
    'routed. "Refused" is an answer with a reason; "wrong" would be a model that computes something else. "Parts": '
    '"block" routes whole blocks, as the paper does. Where no whole block of a model can be routed, a branch is tried: '
    '"mlp" (or "attention") routes that branch of each block alone, and the rest of the block runs on every token. '
    "Such a model passes by a branch only; it goes through the same stages, and counts in every column as the others "
    "do, so the two kinds are told apart in the table below."
)
_READINGS = (
    "(a) counts every model that traces. (b) leaves out those that have nothing to route: no block of theirs has "
    "attention over its own tokens alone and no branch of theirs keeps tokens apart, and they are refused on purpose; "
    "they are named below. (c) counts the transformers: those that trace and whose plain forward holds attention."
)


def render(result: CoverageResult) -> str:
    """The whole result as markdown.

    >>> render(CoverageResult(())).splitlines()[0]
    '# Coverage'
    """
    stages = STAGES[: STAGES.index(result.last) + 1]
    families = {f: [r for r in result.rows if r.family == f] for f in dict.fromkeys(r.family for r in result.rows)}
    parts = [
        "# Coverage",
        origin(result),
        grid(("family", *stages), (counts(f, rows, stages) for f, rows in families.items())),
        "\n".join(f"- **{s}**: {_MEANING[s]}" for s in stages),
        _LEGEND,
        grid(_headings(stages), (_figures(f, rows, stages, result.registered.get(f)) for f, rows in families.items())),
        _READINGS,
        *(_left_out(f, rows) for f, rows in families.items()),
        *(_missing(f, families.get(f, []), names, _goal(stages)) for f, names in result.registered.items()),
    ]
    for family, rows in families.items():
        parts += [
            f"## {family}",
            grid(("outcome", "models"), _outcomes(rows)),
            grid(("model", "class", "parts", "routed", "stops at", "outcome", "reason"), map(_cells, rows)),
        ]
    return "\n\n".join(p for p in parts if p) + "\n"


def by_construction(row: CoverageRow) -> str | None:
    """Why a refused model has nothing to route, or None: every block of it must be refused for such a reason.

    >>> by_construction(CoverageRow("image", "resnet", "ResNet", failed="blocks", reason="no attention in it"))
    'no attention'
    """
    if row.failed != "blocks":
        return None
    kinds = [_kind(reason) for reason in [row.reason, *(reason for _, reason in row.skipped)]]
    return kinds[0] if all(kinds) or kinds[0] == "no attention" else None


def _kind(reason: str) -> str | None:
    return next((kind for kind, pattern in _CONSTRUCTION.items() if re.search(pattern, reason)), None)


def origin(result: CoverageResult, command: str = "modpass coverage") -> str:
    """Which command printed a result, and what it was measured with.

    >>> origin(CoverageResult(()))
    'Printed by `modpass coverage`.'
    """
    made_with = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    states = Counter(r.code for r in result.rows if r.code)
    told = ", ".join(f"{code} ({n})" for code, n in states.most_common())
    codes = f" State of the pass, as a digest of its source files, by rows: {told}." if told else ""
    return f"Printed by `{command}`{f', measured with {made_with}' if made_with else ''}.{codes}"


def counts(family: str, rows: Sequence[CoverageRow], stages: Sequence[str]) -> tuple[str, ...]:
    """A line of a table: how many rows of a family passed each stage.

    >>> counts("image", [CoverageRow("image", "vit", "ViT", ("make",))], ("make", "run"))
    ('image', '1', '0')
    """
    return (family, *(str(sum(r.reached(s) for r in rows)) for s in stages))


def _headings(stages: Sequence[str]) -> tuple[str, ...]:
    goal = _goal(stages)
    built = ("TensorRT-RTX builds, of those that reach ONNX",) if "tensorrt" in stages else ()
    return (
        "family", "measured", f"{goal}, (a) of all that trace", f"{goal}, (b) of those with something to route",
        f"{goal}, (c) of transformers", "passed (a) by whole blocks", "by a branch only",
        *built, "wrong", "crashed or timed out",
    )  # fmt: skip


def _goal(stages: Sequence[str]) -> str:
    return "onnxruntime" if "onnxruntime" in stages else stages[-1]


def _figures(
    family: str, rows: Sequence[CoverageRow], stages: Sequence[str], registered: Sequence[str] | None
) -> tuple[str, ...]:
    goal, traced = _goal(stages), [r for r in rows if r.reached("trace")]
    exported = [r for r in rows if r.reached("onnx")]
    built = (_share(exported, lambda r: r.reached("tensorrt")),) if "tensorrt" in stages else ()
    return (
        family,
        f"{len(rows)} of {len(registered)}" if registered else str(len(rows)),
        _share(traced, lambda r: r.reached(goal)),
        _share([r for r in traced if by_construction(r) is None], lambda r: r.reached(goal)),
        _share([r for r in traced if r.attends], lambda r: r.reached(goal)),
        *_by_parts([r for r in traced if r.reached(goal)]),
        *built,
        str(sum(r.outcome == "wrong" for r in rows)),
        str(sum(r.outcome in ("crashed", "timed out") for r in rows)),
    )


def _by_parts(passed: Sequence[CoverageRow]) -> tuple[str, str]:
    """How many passed as whole blocks, and how many by which branch."""
    found = Counter(r.parts for r in passed)
    branches = [f"{found[part]} {part}" for part in ("mlp", "attention") if found[part]]
    total = str(found["mlp"] + found["attention"])
    return str(found["block"]), f"{total} ({', '.join(branches)})" if branches else total


def _share(rows: Sequence[CoverageRow], passed: Callable[[CoverageRow], bool]) -> str:
    count = sum(map(passed, rows))
    return f"{count} of {len(rows)} ({count / len(rows):.1%})" if rows else "none"


def _left_out(family: str, rows: Sequence[CoverageRow]) -> str:
    kinds = {r.name: by_construction(r) for r in rows if r.reached("trace")}
    named = [(kind, [n for n, k in kinds.items() if k == kind]) for kind in _CONSTRUCTION]
    lines = [f"{kind} ({len(names)}): {', '.join(names)}" for kind, names in named if names]
    return f"- Left out of (b) in {family}: {'; '.join(lines)}." if lines else ""


def _missing(family: str, rows: Sequence[CoverageRow], names: Sequence[str], goal: str) -> str:
    missing = [n for n in names if n not in {r.name for r in rows}]
    if not missing:
        return ""
    passed, traced = sum(r.reached(goal) for r in rows), sum(r.reached("trace") for r in rows) + len(missing)
    bound = f"if each of them traced and failed, (a) would be {passed} of {traced} ({passed / traced:.1%})"
    return f"- **Not measured** in {family} ({len(missing)}): {', '.join(missing)}; {bound}."


def _outcomes(rows: Iterable[CoverageRow]) -> list[tuple[str, str]]:
    return [(outcome, str(n)) for outcome, n in Counter(r.outcome for r in rows).most_common()]


def _cells(row: CoverageRow) -> tuple[str, ...]:
    found = row.blocks + len(row.skipped)
    reason = row.reason or (f"{row.skipped[0][0]} is not routed: {row.skipped[0][1]}" if row.skipped else "")
    routed = f"{row.blocks} of {found}" if found else "–"
    return (row.name, row.kind, row.parts or "–", routed, row.failed or "", row.outcome, reason)


def grid(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table.

    >>> print(grid(["a"], [["b|c"]]))
    | a |
    | --- |
    | b\\|c |
    """
    lines = [headings, ["---"] * len(headings), *rows]
    clean = ([" ".join(cell.replace("|", "\\|").split()) for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in clean)
