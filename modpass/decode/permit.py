"""Which operators a step cannot make of one token, caches, and what it remembers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from modpass.analysis import canonical_arguments, merges_rows
from modpass.decode.worlds import is_size
from modpass.mixing import mixing_reason
from modpass.sizes import SEQUENCE, Refusal, Sizes
from modpass.sparse import picks_keys
from modpass.symbols import expr_of, value_of

__all__ = ["refuse_mixing"]


def refuse_mixing(tokens: list[fx.Node], sizes: Sizes, remembered: Collection[fx.Node] = ()) -> None:
    """Refuse operators that mix tokens outside attention, or that compute with the sequence length.

    remembered: those that a step makes of what it remembers.

    Raises:
        Refusal: names the operator.
    """
    for node in (n for n in tokens if n.op == "call_function"):
        reason = mixing_reason(node, sizes.carries, sizes.is_batch) or merges_rows(node, sizes)
        if reason and node not in remembered and not picks_keys(node, sizes.carries):
            raise Refusal(f"{reason} (node {node.name})")
        lengths = [a for a in node.all_input_nodes if is_size(a) and sizes.carries(_expr(a))]
        if any(kind in ("number", "Tensor") and a in lengths for kind, a in canonical_arguments(node)):
            raise Refusal(f"{node.target} computes with the sequence length (node {node.name})")


def _expr(node: fx.Node) -> Any:
    return expr_of(value_of(node)) if isinstance(value_of(node), torch.SymInt) else SEQUENCE
