"""Sizes such as ``min(S, 256)``, which are S where the trace holds for no more than 256 tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from modpass.mixing import name_of
from modpass.sizes import Refusal
from modpass.symbols import Expr, expr_of, traced_value, value_of

__all__ = ["settle_limits"]


def settle_limits(graph: fx.Graph, sequence: Expr, longest: int | None) -> None:
    """Say S in place of the least of S and a number that S never exceeds, and what is computed with it anew.

    A model that works in chunks is traced for one of them.

    Raises:
        Refusal: what depends on such a size cannot be said with S.
    """
    changed: set[fx.Node] = set()
    for node in list(graph.nodes):
        if (whole := _unlimited(node, sequence, longest)) is not None:
            changed |= set(node.users)
            node.replace_all_uses_with(whole)
            graph.erase_node(node)
    if not changed:
        return
    mode = next(value_of(n).fake_mode for n in graph.nodes if n.op == "placeholder" and isinstance(value_of(n), Tensor))
    for node in graph.nodes:
        if node.op == "call_function" and (node in changed or any(a in changed for a in node.all_input_nodes)):
            changed.add(node)
            try:
                node.meta["val"] = traced_value(mode, node.target, node.args, node.kwargs)
            except RuntimeError as e:
                raise Refusal(f"{node.target} does not work on {sequence} tokens (node {node.name}): {e}") from e


def _unlimited(node: fx.Node, sequence: Expr, longest: int | None) -> Any:
    """The node that is the sequence, where ``node`` is the least of it and a number as large as the longest."""
    if longest is None or node.op != "call_function" or name_of(node) not in ("sym_min", "min"):
        return None
    numbers = [a for a in node.args if isinstance(a, int)]
    sizes = [a for a in node.args if isinstance(a, fx.Node) and isinstance(value_of(a), torch.SymInt)]
    fits = len(numbers) == len(sizes) == 1 and numbers[0] >= longest
    return sizes[0] if fits and expr_of(value_of(sizes[0])) == sequence else None
