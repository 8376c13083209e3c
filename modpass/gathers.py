"""How a block's side inputs follow the chosen tokens."""

from __future__ import annotations

from typing import Any

import sympy
from torch import fx

from modpass.functional import Gather
from modpass.mixing import is_pointwise, name_of
from modpass.sizes import SEQUENCE, Refusal, Sizes
from modpass.symbols import Expr, expr_of, hint_of, shape_of, value_of

__all__ = ["gather_of"]


def gather_of(node: fx.Node, side: fx.Node, sizes: Sizes) -> Gather | None:
    """How ``side`` follows the tokens into ``node``: aligned from the right, as broadcasting aligns it.

    None where it has no dim that counts them.

    Raises:
        Refusal: the two do not meet by broadcasting.
    """
    value: Any = value_of(side)
    shape = _as_broadcast(node, side, value, sizes)
    counted = [i for i, size in enumerate(shape) if sizes.carries(size)]
    if not counted:
        return None
    shown = f"{side.name}[{', '.join(str(sizes.canonical(s)) for s in shape)}]"
    out = _broadcast_shape(node, side)
    if out is None or len(shape) > len(out):
        raise Refusal(f"the side input {shown} meets {node.target}, which does not broadcast (node {node.name})")
    offset = len(out) - len(shape)
    if any(sizes.canonical(shape[i]) != SEQUENCE or sizes.canonical(out[offset + i]) != SEQUENCE for i in counted):
        raise Refusal(f"the side input {shown} has a dim that is not the sequence S (node {node.name})")
    for position, size in enumerate(out):
        repeat = sympy.simplify(size / sizes.batch)
        if repeat.is_Integer and (size == sizes.batch or position == 0):
            own = value.shape[position - offset] if position >= offset else 1
            batched = bool(expr_of(own) == size) or hint_of(own) not in (None, 1)
            return Gather(len(out), position, batched, tuple(offset + i for i in counted), int(repeat))
    raise Refusal(f"{node.target} has no batch dim to gather the side input {shown} by (node {node.name})")


def _as_broadcast(node: fx.Node, side: fx.Node, value: Any, sizes: Sizes) -> tuple[Expr, ...]:
    """Any size but 1 that broadcasts against S is S, in whatever words the trace has it.

    It may be cut from a table (``L - Max(0, L - S)``), be a number, where the model runs at this length alone, or come
    from another input.
    """
    shape, out = shape_of(value), _broadcast_shape(node, side) or ()
    offset, found = len(out) - len(shape), list(shape)
    for i, size in enumerate(shape):
        if offset < 0 or size in (0, 1) or out[offset + i].is_Integer or hint_of(value.shape[i]) is None:
            continue  # what is empty is put beside the tokens, and has none of theirs
        if sizes.canonical(size) != SEQUENCE and sizes.canonical(out[offset + i]) == SEQUENCE:
            found[i] = sympy.Integer(1) if hint_of(value.shape[i]) == 1 else sizes.sequence
    return tuple(found)


def _broadcast_shape(node: fx.Node, side: fx.Node) -> tuple[Expr, ...] | None:
    keys = {"scaled_dot_product_attention": node.args[1:3], "matmul": node.args[1:2], "bmm": node.args[1:2]}
    if side in keys.get(name_of(node), ()) and len(shape_of(value_of(side))) >= 3:
        return shape_of(value_of(side))  # keys and values made by another layer: those of the chosen tokens
    if name_of(node) == "matmul" and side is node.args[0]:
        own, out = shape_of(value_of(side)), shape_of(value_of(node))
        return (*out[:-2], *own[-2:]) if len(own) > 2 and own[-1].is_Integer and own[-2].is_Integer else None
    if name_of(node) == "scaled_dot_product_attention":
        query, key = (shape_of(value_of(a)) for a in node.args[:2] if isinstance(a, fx.Node))
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        return (*query[:-1], key[-2]) if mask is side else None
    if (name_of(node), side) in (("baddbmm", node.args[0]), ("gather", node.args[-1])):
        return shape_of(value_of(node))  # the places that a gather reads are shaped like what it makes
    return shape_of(value_of(node)) if is_pointwise(node) or name_of(node) in ("cat", "concat") else None
