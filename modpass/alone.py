"""A branch of a block that cannot be routed as a whole: windows mix its tokens, but its MLP keeps them apart."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from torch import fx

from modpass.analysis import Analysis, analyse_part, sketch
from modpass.branches import Branches, Cut, upstream
from modpass.parts import NAMES
from modpass.plane_branch import plane_branch, plane_sums
from modpass.reopen import Reopened, Reopener
from modpass.sizes import Refusal

__all__ = ["branch_alone"]


def branch_alone(name: str, nodes: list[fx.Node], kind: str, reopener: Reopener) -> tuple[Analysis, Reopened | None]:
    """The analysis of the one branch of ``kind``, "attention" or "mlp", of the block ``name``, by itself.

    Where the trace fixed its sequence, or has it in two dims, also its own graph, in which the sequence is free.

    Raises:
        Refusal: the block has no such branch, several, or its tokens meet there too.
    """
    try:
        rough = sketch(nodes)
    except Refusal:
        if kind != "mlp" or not plane_sums(nodes):
            raise
        reopened = reopener.reopen_plane(name, plane_branch(nodes))
        return reopened.analysis, reopened
    branches = Branches(rough)
    found: list[tuple[Cut, tuple[Analysis, Reopened | None]]] = []
    reason = branches.inseparable or f"it has no {NAMES[kind]}, as a residual of its own"
    for cut in branches.pieces(kind):
        try:
            found.append((cut, _analysed(name, nodes, cut, rough, reopener)))
        except Refusal as e:
            reason = str(e)
    if not found:
        raise Refusal(reason)
    if len(found) == 1:
        return found[0][1]
    cuts = [cut for cut, _ in found]
    if any(a.output is not b.stream for a, b in pairwise(cuts)):
        raise Refusal(f"it has {len(cuts)} branches that could be its {kind}")
    return _analysed(name, nodes, Cut(cuts[0].stream, cuts[-1].output), rough, reopener)


def _analysed(
    name: str, nodes: list[fx.Node], cut: Cut, rough: Analysis, reopener: Reopener
) -> tuple[Analysis, Reopened | None]:
    inside = upstream([cut.output], nodes, cut.stream) | {cut.output}
    own = [n for n in nodes if n in inside]
    if not rough.fixed:
        return analyse_part(own, cut.stream, cut.output, rough.sizes, rough.seq_dim), None
    tokens = set(rough.tokens)
    fixed = replace(rough, stream=cut.stream, output=cut.output, tokens=[n for n in own if n in tokens])
    reopened = reopener.reopen_part(name, fixed)
    return reopened.analysis, reopened
