"""Which operators a step cannot make of one token, caches, and what it remembers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from modpass.analysis import canonical_arguments, merges_rows
from modpass.decode.worlds import is_size
from modpass.mixing import mixing_reason, name_of
from modpass.sizes import SEQUENCE, Refusal, Sizes
from modpass.sparse import picks_keys
from modpass.symbols import expr_of, shape_of, value_of

__all__ = ["refuse_mixing"]


def refuse_mixing(tokens: list[fx.Node], sizes: Sizes, remembered: Collection[fx.Node] = ()) -> None:
    """Refuse operators that mix tokens outside attention, or that compute with the sequence length.

    remembered: those that a step makes of what it remembers.

    Raises:
        Refusal: names the operator.
    """
    found: dict[str, tuple[str, fx.Node]] = {}
    for node in (n for n in tokens if n.op == "call_function"):
        reason = mixing_reason(node, sizes.carries, sizes.is_batch) or merges_rows(node, sizes) or _reads(node)
        if reason and node not in remembered and not (picks_keys(node, sizes.carries) or _puts_rows(node, sizes)):
            found.setdefault(str(node.target), (reason, node))
        lengths = [a for a in node.all_input_nodes if is_size(a) and sizes.carries(_expr(a))]
        if any(kind in ("number", "Tensor") and a in lengths for kind, a in canonical_arguments(node)):
            found.setdefault(str(node.target), (f"{node.target} computes with the sequence length", node))
    if found:
        (reason, node), *others = found.values()
        beside = f"; later also {', '.join(n for n in list(found)[1:])}" if others else ""
        raise Refusal(f"{reason} (node {node.name}){beside}")


def _reads(node: fx.Node) -> str | None:
    return f"{node.target} makes a number out of token values" if name_of(node) == "item" and node.users else None


def _puts_rows(node: fx.Node, sizes: Sizes) -> bool:
    """Whether whole rows are written where a mask of rows, which no token decides, holds true.

    What is written has one entry a row that the mask picks; the other dims lie where they did.
    """
    if name_of(node) != "index_put":
        return False
    target, places, *_ = node.args
    mask = places[0] if isinstance(places, list | tuple) and len(places) == 1 else None
    if not isinstance(target, fx.Node) or not isinstance(mask, fx.Node) or value_of(mask).dtype != torch.bool:
        return False
    shape = shape_of(value_of(mask))
    return not any(map(sizes.carries, shape)) and shape == shape_of(value_of(target))[: len(shape)]


def _expr(node: fx.Node) -> Any:
    return expr_of(value_of(node)) if isinstance(value_of(node), torch.SymInt) else SEQUENCE
