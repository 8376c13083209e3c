"""Why a trace holds for one length alone, in words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from modpass.mixing import name_of
from modpass.model import RoutedModel
from modpass.record import evaluated
from modpass.symbols import shape_of, value_of

__all__ = ["why_fixed"]


def why_fixed(model: RoutedModel, graph: fx.Graph) -> str:
    """What is wrong with a trace without a free sequence, and what in it made the length a number."""
    lengths = {int(d): s.name for s in model.inputs for d in s.dims[1:2] if isinstance(d, int) and len(s.dims) == 2}
    if not lengths:
        return "the trace has no free sequence, so there is nothing to decode"
    length, name = next(iter(lengths.items()))
    said = f"the trace holds for {length} tokens alone" + _cause(graph, length)
    later = _sees_later(model, name, length)
    return f"{said}, so that there is nothing to decode" + (f"; nor is it causal: {later}" if later else "")


def _cause(graph: fx.Graph, length: int) -> str:
    single: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if name_of(node) == "select" and shape_of(value_of(node.args[0]))[node.args[1]] == length:
            single.setdefault(node.args[2], node)
    if len(single) >= length - 1:
        first = next(iter(single.values()))
        return f", which it takes one by one in a loop, as a recurrent scan does (node {first.name})"
    held = (n for n in graph.nodes if n.op == "get_attr" and shape_of(value_of(n)) == (length,))
    constant = next((n for n in held if "lifted_tensor" in str(n.target)), None)
    return "" if constant is None else f", of whose number its code makes a constant (node {constant.name})"


def _sees_later(model: RoutedModel, name: str, length: int) -> str:
    """By how much other tokens in the second half change outputs of the first; empty where they do not."""
    given: dict[str, Any] = {s.name: s.example for s in model.inputs}
    ids = given[name]
    if any(v is None for v in given.values()) or ids.is_floating_point() or length < 2:
        return ""
    half = length // 2
    other = ids.clone()
    other[:, half:] = ids[:, half:].flip(1).roll(1, 1)
    with torch.no_grad(), evaluated(model):
        found = [_first(model(**{**given, name: v})) for v in (ids, other)]
    if any(f is None or f.dim() < 2 or f.shape[1] != length for f in found):
        return ""
    ends: list[Any] = [f[:, :half] for f in found if f is not None]
    difference = float((ends[0] - ends[1]).abs().max())
    if difference <= 1e-4 * float(ends[0].abs().max()):
        return ""
    return f"other tokens from {half} on change what earlier ones compute by {difference:.2g}"


def _first(output: Any) -> Tensor | None:
    return next((v for v in pytree.tree_leaves(output) if isinstance(v, Tensor) and v.is_floating_point()), None)
