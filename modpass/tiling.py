"""Tokens copied once for each expert: ``[T, D].repeat(E, 1)`` keeps tokens apart if it is read as ``[E, T, D]``."""

from __future__ import annotations

from collections.abc import Callable

import sympy
from torch import fx

from modpass.symbols import Expr, shape_of, value_of

__all__ = ["tiles_apart"]

_VIEWS = ("view", "reshape", "_unsafe_view")


def tiles_apart(node: fx.Node, carries: Callable[[Expr], bool], keeps: Callable[[fx.Node], bool]) -> bool:
    """Whether a ``repeat`` along a leading token dim is only ever read copy by copy.

    keeps: whether an operator keeps the leading dim as it is. Every reshape that follows must put the copies in
    front of the tokens: the other order would pair a token with its neighbours.
    """
    given, made = (shape_of(value_of(n)) for n in (node.args[0], node))  # type: ignore[arg-type]
    if len(given) != len(made) or not carries(given[0]) or given[1:] != made[1:] or any(map(carries, given[1:])):
        return False
    frontier, seen = [node], {node}
    while frontier:
        for user in frontier.pop().users:
            if user in seen:
                continue
            seen.add(user)
            shape = shape_of(value_of(user))
            if _name(user) in _VIEWS and shape[:1] != made[:1]:
                if not _copy_by_copy(user, given[0]):
                    return False
            elif shape[:1] == made[:1] and (keeps(user) or _name(user) in _VIEWS):
                frontier.append(user)
            else:
                return False
    return True


def _copy_by_copy(view: fx.Node, tokens: Expr) -> bool:
    """Whether it makes ``[copies, T, ...]`` of ``[copies * T, ...]``."""
    before, after = (shape_of(value_of(n)) for n in (view.args[0], view))  # type: ignore[arg-type]
    inner = sympy.prod(after[2:]) - sympy.prod(before[1:])
    return len(after) > 1 and sympy.expand(after[1] - tokens) == 0 and sympy.expand(inner) == 0


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[-1] if schema is not None else ""
