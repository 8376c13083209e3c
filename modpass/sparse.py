"""Sparse attention that picks its keys: a top-k over scores of keys, used for nothing but a mask of them.

Among some of the tokens it picks among their keys, as the model would that has no other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from modpass.mixing import UNIFORM, name_of
from modpass.symbols import Expr, shape_of, value_of

__all__ = ["is_pick", "picks_keys"]

Carries = Callable[[Expr], bool]

_CASTS = {"to", "_to_copy", "long", "clone", "contiguous", "detach", "alias"}


def picks_keys(node: fx.Node, carries: Carries) -> bool:
    """Whether ``node`` is the top-k, or the scatter that makes a mask of it.

    >>> picks_keys(fx.Graph().placeholder("x"), lambda size: True)
    False
    """
    if name_of(node) == "scatter":
        source = _source(node.args[2])
        return source is not None and _is_mask(node) and picks_keys(source, carries)
    if not is_pick(node, carries):
        return False
    places = [u for u in node.users if u.args[1] == 1]
    return len(places) == len(node.users) and all(_is_mask(end) for p in places for end in _ends(p))


def is_pick(node: fx.Node, carries: Carries) -> bool:
    """Whether ``node`` ranks the keys of each query: the last of two token dims."""
    if name_of(node) != "topk" or not isinstance(node.args[0], fx.Node):
        return False
    shape = shape_of(value_of(node.args[0]))
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", -1)
    return dim in (-1, len(shape) - 1) and carries(shape[-1]) and sum(map(carries, shape)) > 1


def _ends(node: fx.Node) -> Iterator[fx.Node]:
    """What uses a node, casts looked through."""
    for user in node.users:
        yield from _ends(user) if name_of(user) in _CASTS else (user,)


def _source(index: Any) -> fx.Node | None:
    """The node with several outputs that an index is the second of."""
    while isinstance(index, fx.Node) and name_of(index) in _CASTS:
        index = index.args[0]
    part = index if isinstance(index, fx.Node) and name_of(index) == "getitem" else None
    source: Any = None if part is None or part.args[1] != 1 else part.args[0]
    return source if isinstance(source, fx.Node) else None


def _is_mask(node: fx.Node) -> bool:
    """Whether a node puts one number at places along the last dim of a blank tensor."""
    if name_of(node) != "scatter":
        return False
    blank, dim, *_, value = node.args
    assert isinstance(blank, fx.Node)
    last = dim in (-1, len(shape_of(value_of(node))) - 1)
    return last and name_of(blank) in UNIFORM and not isinstance(value, fx.Node)
