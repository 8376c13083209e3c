"""Inputs with several rows for each row of the batch, such as one for each codebook of a sound."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils._sympy.functions import FloorDiv

from modpass.causal import dependent
from modpass.sizes import Sizes
from modpass.symbols import Expr, shape_of, value_of

__all__ = ["taken_together", "two_rows"]


def taken_together(graph: fx.Graph, sequence: Expr, batch: int) -> tuple[Expr, dict[Any, int]] | None:
    """The batch of hidden values ``[B, S, D]`` made of an input ``[n*B, S]``, and its number of rows for ``batch``.

    None: the first input with a sequence has one row for each of the batch.
    """
    for node in (n for n in graph.nodes if n.op == "placeholder"):
        given = shape_of(value_of(node))
        if len(given) < 2 or given[1] != sequence or not given[0].is_Symbol:
            continue
        for user in dependent(graph, node):
            shape = shape_of(value_of(user))
            if len(shape) == 3 and shape[1] == sequence and shape[2].is_Integer:
                return _share(shape[0], given[0], batch)
    return None


def _share(size: Expr, rows: Expr, batch: int) -> tuple[Expr, dict[Any, int]] | None:
    """``size`` where it is ``rows`` divided by a whole number n, and ``rows`` as n times the batch."""
    if not isinstance(size, FloorDiv) or size.args[0] != rows or not size.args[1].is_Integer:
        return None
    return size, {rows: int(size.args[1]) * batch}


def two_rows(sizes: Sizes, known: dict[Any, int]) -> dict[Any, int]:
    """``known`` for a batch of two.

    >>> import sympy
    >>> s = sympy.Symbol("s", integer=True, positive=True)
    >>> two_rows(Sizes(s, sympy.Symbol("t")), {s: 5})
    {s: 2}
    """
    batch: Any = sizes.batch.subs(known)
    wider = {s: 2 * known[s] // int(batch) for s in sizes.batch.free_symbols if s in known}
    return {**known, **wider, sizes.batch: 2}
