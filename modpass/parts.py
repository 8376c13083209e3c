"""Route one part of a block alone: its attention or its MLP, where it is a residual of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from modpass.analysis import Analysis
from modpass.branches import Branches, Cut, upstream
from modpass.rewrite import regroup
from modpass.sizes import Refusal

__all__ = ["NAMES", "Parts", "cut_out", "find_cut", "parts_of"]

Parts = Literal["block", "attention", "mlp"]

NAMES = {"attention": "attention over its tokens", "mlp": "MLP, a branch with a product and without attention"}


def parts_of(analysis: Analysis) -> dict[str, Cut | str]:
    """Each part of a block, or the reason why it cannot be routed by itself."""
    found: dict[str, Cut | str] = {}
    for kind in ("attention", "mlp"):
        try:
            found[kind] = find_cut(analysis, kind)
        except Refusal as e:
            found[kind] = str(e)
    return found


def find_cut(analysis: Analysis, kind: str) -> Cut:
    """The one place of a part, "attention" or "mlp".

    Raises:
        Refusal: the block has no such part, several, or it is no residual by itself.
    """
    branches = Branches(analysis)
    cuts = branches.cuts(kind)
    if len(cuts) > 1:
        raise Refusal(f"it has {len(cuts)} parts that could be its {kind}; route the whole block")
    if not cuts:
        raise Refusal(branches.inseparable or f"it has no {NAMES[kind]}, as a residual of its own")
    return cuts[0]


def cut_out(analysis: Analysis, cut: Cut) -> Analysis:
    """The analysis of a part; a sum of both parts is regrouped in the graph, so that the part has an output."""
    if cut.terms:
        cut = Cut(cut.stream, regroup(cut.output, cut.stream, cut.terms))
    own = {cut.output} | upstream([cut.output], [*analysis.tokens, cut.output], cut.stream)
    used = {a for n in own for a in upstream([n], [*analysis.hoisted, n])}
    return replace(
        analysis,
        stream=cut.stream,
        output=cut.output,
        tokens=[n for n in cut.output.graph.nodes if n in own],
        hoisted=[n for n in analysis.hoisted if n in used],
        gathers={(n, side): gather for (n, side), gather in analysis.gathers.items() if n in own},
        unknown=[n for n in analysis.unknown if n in own],
    )
