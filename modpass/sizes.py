"""The sizes of a trace in terms of the sequence S, and the refusal of what does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import sympy
from torch.utils._sympy.functions import Min

from modpass.symbols import Expr

__all__ = ["SEQUENCE", "Refusal", "Sizes"]

SEQUENCE = sympy.Symbol("S", positive=True, integer=True)


class Refusal(Exception):
    """A region that cannot be routed; the message is the reason."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that a block is parametric in: its batch and its sequence, as expressions of the trace."""

    batch: Expr
    sequence: Expr

    def canonical(self, size: Expr) -> Expr:
        """``size`` in terms of S where the sequence is itself an expression, such as patches + 1."""
        return _canonical(size, self.sequence)

    def carries(self, size: Expr) -> bool:
        """Whether a size counts tokens."""
        return SEQUENCE in self.canonical(size).free_symbols

    def is_batch(self, size: Expr) -> bool:
        """Whether a size counts rows of the batch and no tokens."""
        return bool(self.batch.free_symbols & size.free_symbols) and not self.carries(size)

    def surplus(self, size: Expr) -> int:
        """How many keys beside the tokens a size counts: 1 for S + 1 where attention has a sink, else 0."""
        extra = self.canonical(size) - SEQUENCE
        return int(extra) if extra.is_Integer and extra > 0 else 0

    def is_parametric(self, size: Expr) -> bool:
        """Whether a size shrinks with the chosen tokens: free of S, a multiple of it, or S up to a limit."""
        if isinstance(size := self.canonical(size), Min):
            return all(arg.is_Integer or arg == SEQUENCE for arg in size.args)
        return SEQUENCE not in (self.canonical(size) / SEQUENCE).free_symbols or not self.carries(size)


@lru_cache(maxsize=65536)
def _canonical(size: Expr, sequence: Expr) -> Expr:
    # sympy takes its time, and asks are many and of few sizes
    if sequence.is_Symbol:
        return size.subs(sequence, SEQUENCE)
    replaced = size.subs(sequence, SEQUENCE)
    for symbol in replaced.free_symbols & sequence.free_symbols:
        try:
            solved = sympy.solve(sequence - SEQUENCE, symbol)
        except NotImplementedError:  # floor division: only the very same expression is S
            continue
        replaced = replaced.subs(symbol, solved[0]) if len(solved) == 1 else replaced
    return sympy.expand(replaced)
