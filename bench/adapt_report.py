"""The table, the picture and the verdict of the study of pretrained models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from modpass.bench.adapt_result import AdaptResult
from modpass.errors import require

__all__ = ["adapt_headings", "adapt_markdown", "adapt_table", "save_adapt_plot", "verdict"]

_HOW = {
    ("dense", "block"): "dense",
    ("drop", "block"): "drop layers",
    ("spaced", "block"): "drop layers at equal distances",
    ("drop", "mlp"): "drop MLPs",
    ("route", "block"): "route blocks",
    ("route", "mlp"): "route MLPs",
}
_TUNED = {"routers": "routers tuned", "lora": "LoRA tuned on the text", "distil": "LoRA distilled"}


def adapt_headings(results: Sequence[AdaptResult]) -> tuple[str, ...]:
    """The columns of ``adapt_table``."""
    texts = (f"perplexity, {t}" for r in results[:1] for t in r.losses)
    return ("model", "blocks", "capacities", "operations", *texts)


def adapt_table(results: Sequence[AdaptResult]) -> list[tuple[str, ...]]:
    """One row of text per variant: what it is, blocks changed, capacity, share of the operations, perplexities.

    >>> dense = {"how": "dense", "parts": "block", "tune": ""}
    >>> adapt_table([AdaptResult(dense, {}, 1.0, {"a": 0.0})])
    [('dense', '', '', '100.0 %', '1.00')]
    """
    return [
        (
            _name(r),
            str(len(r.blocks)) if r.blocks else "",
            _capacities(r),
            f"{100 * r.flops:.1f} %",
            *(f"{r.perplexity(t):.2f}" for t in r.losses),
        )
        for r in results
    ]


def adapt_markdown(results: Sequence[AdaptResult]) -> str:
    """The same as a table in Markdown."""
    headings = adapt_headings(results)
    rows = [headings, tuple("---" for _ in headings), *adapt_table(results)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def verdict(results: Sequence[AdaptResult]) -> dict[str, dict[str, float]]:
    """Of each routed variant that was not tuned: its perplexity over the best that dropping reaches, by text.

    Dropping is at the same number of operations or above, without tuning too; below 1 routing is better.

    >>> at = {"tune": "", "layers": 2}
    >>> drop, route = {"how": "drop", "name": "d", **at}, {"how": "route", "name": "r", **at}
    >>> verdict([AdaptResult(drop, {}, 0.9, {"a": 1.0}), AdaptResult(route, {}, 0.9, {"a": 1.0})])
    {'r': {'a': 1.0}}
    """
    plain = [r for r in results if not r.variant["tune"]]
    found: dict[str, dict[str, float]] = {}
    for result in (r for r in plain if r.variant["how"] == "route"):
        same = [r for r in plain if r.variant["layers"] == result.variant["layers"] and r.flops >= result.flops]
        dropped = [r for r in same if r.variant["how"] in ("drop", "spaced")]
        if dropped:
            best = {t: min(r.perplexity(t) for r in dropped) for t in result.losses}
            found[result.variant["name"]] = {t: result.perplexity(t) / best[t] for t in best}
    return found


def save_adapt_plot(results: Sequence[AdaptResult], path: Path) -> None:
    """Perplexity on each text against operations, a line per kind of model; written as PNG.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    texts = list(results[0].losses)
    figure = require("matplotlib.figure", "bench").Figure(figsize=(5.5 * len(texts), 4.5), layout="constrained")
    kinds: dict[str, list[AdaptResult]] = {}
    for result in results:
        kinds.setdefault(_name(result), []).append(result)
    for text, axes in zip(texts, figure.subplots(1, len(texts), squeeze=False)[0], strict=True):
        for kind, members in kinds.items():
            points = sorted((r.flops, r.perplexity(text)) for r in members)
            line = ":" if "route" not in kind else "-"
            axes.plot(*zip(*points, strict=True), line, marker="x" if len(points) == 1 else "o", label=kind)
        axes.set_xlabel("operations, share of the dense model's")
        axes.set_ylabel(f"perplexity, {text}")
        axes.set_yscale("log")
    axes.legend(fontsize="x-small", frameon=False)
    figure.savefig(path, format="png", dpi=120)


def _name(result: AdaptResult) -> str:
    variant = result.variant
    how = _HOW[variant["how"], variant["parts"]]
    alone = variant["how"] in ("drop", "route") and not variant["together"]
    tuned = _TUNED.get(variant["tune"], "")
    return how + (", picked alone" if alone else "") + (f"; {tuned}" if tuned else "")


def _capacities(result: AdaptResult) -> str:
    """How many blocks have each capacity: ``3 x 0.25, 2 x 0.5``."""
    counts = Counter(c for c in result.blocks.values() if c)
    return ", ".join(f"{n} x {c:g}" for c, n in sorted(counts.items()))
