"""What decode and prefill share: the whole model's graph, which inputs are tokens, and its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.export import ExportedProgram

from modpass.attention import PRODUCTS, arguments_of, is_fused
from modpass.causal import dependent
from modpass.decode.experts import sorted_by_expert
from modpass.decode.fixed import why_fixed
from modpass.decode.limits import settle_limits
from modpass.decode.memory import Memory, find_memory
from modpass.decode.permit import refuse_mixing
from modpass.decode.together import taken_together
from modpass.dropout import undo_dropout
from modpass.errors import BlockError, InputError
from modpass.mixing import MOVED, name_of
from modpass.model import RoutedModel
from modpass.sizes import Refusal, Sizes
from modpass.symbols import Expr, shape_of, value_of
from modpass.transform import trace

__all__ = ["Outer", "open_model", "whole_numbers"]

_HIDES = PRODUCTS | {"embedding", "linear", "mm", "addmm"}


@dataclass
class Outer:
    """A traced model without dropout.

    tokens: the inputs that carry one entry a token; whole: those that are needed at full length, such as masks;
    known: the numbers of every free size but the sequence; rows: B, those of hidden values, for each of which an
    input may have several; memory: what is remembered outside attention.
    """

    model: RoutedModel
    graph: fx.Graph
    sizes: Sizes
    tokens: list[fx.Node]
    whole: list[fx.Node]
    known: dict[Any, int]
    rows: int
    memory: Memory


def open_model(model: nn.Module | ExportedProgram, batch: int, dims: Mapping[str, int] | None = None) -> Outer:
    """Look at a model as decode does; traces it first where it is not yet traced.

    Raises:
        InputError: a size is missing or not what is allowed.
        BlockError: it cannot be decoded; says why.
    """
    routed = model if isinstance(model, RoutedModel) else trace(model)
    for name, block in routed.routed_blocks.items():
        if block.selection != "causal":
            raise InputError(
                f"block '{name}' selects by '{block.selection}', which looks at later tokens; decode needs "
                f"selection='causal' (model.routed_blocks['{name}'].selection = 'causal')"
            )
    graph = undo_dropout(routed)
    placeholders = {str(n.target): n for n in graph.nodes if n.op == "placeholder"}
    named = {n: {d: e for d, e in zip(spec.dims, shape_of(value_of(placeholders[spec.name])), strict=True)}
             for spec in routed.inputs for n in [spec.name]}  # fmt: skip
    if not any("sequence" in found for found in named.values()):
        raise BlockError(why_fixed(routed, graph))
    sequence = _symbol(named, "sequence")
    try:
        settle_limits(graph, sequence, _longest(routed))
    except Refusal as e:
        raise BlockError(f"this model cannot be decoded: {e}") from e
    known = _known(named, batch, dims or {})
    rows, given = taken_together(graph, sequence, batch) or (_symbol(named, "batch"), {})
    known |= given
    sizes = Sizes(rows, sequence)
    counted = [placeholders[n] for n, found in named.items() if "sequence" in found]
    whole = [n for n in counted if _is_whole(graph, n, sizes)]
    tokens = [n for n in counted if n not in whole] or [n for n in counted if _is_looked_up(n)]
    whole = [n for n in counted if n not in tokens]
    for name in ("position", "length", "live"):
        if name in named:
            raise InputError(
                f"the model has an input called '{name}', a name that decode needs; trace it under another"
            )
    if any(spec.dims.index("sequence") != 1 for spec in routed.inputs if placeholders[spec.name] in tokens):
        raise BlockError("its tokens come as [sequence, batch]; decode needs [batch, sequence]: wrap the model")
    ids = tokens or [n for n in counted if str(n.target) not in routed.info.call.optional]
    carried = dependent(graph, *ids)
    memory = find_memory(carried, sizes, known)
    try:
        refuse_mixing(carried, sizes, memory.followed | sorted_by_expert(carried, sizes))
    except Refusal as e:
        raise BlockError(f"this model cannot be decoded: {e}") from e
    if not tokens:
        raise BlockError("no input carries one entry a token: each of them decides which tokens attention sees")
    return Outer(routed, graph, sizes, tokens, whole, known, batch, memory)


def whole_numbers(**values: Any) -> None:
    """Refuse sizes that are no whole number of 1 or more.

    Raises:
        InputError: names the first.

    >>> whole_numbers(batch=0)
    Traceback (most recent call last):
    modpass.errors.InputError: batch is 0; it must be a whole number of 1 or more
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} is {value!r}; it must be a whole number of 1 or more")


def _longest(model: RoutedModel) -> int | None:
    """The most tokens that the trace holds for."""
    checks = model.info.call.checks.values()
    ends = [high for c in checks for d, (_, high) in zip(c.dims, c.bounds, strict=True) if d == "sequence"]
    return min((int(e) for e in ends if e is not None), default=None)


def _symbol(named: Mapping[str, Mapping[Any, Expr]], name: str) -> Expr:
    found = next((dims[name] for dims in named.values() if name in dims), None)
    if found is None:
        raise BlockError(f"the trace has no free {name}, so there is nothing to decode")
    return found


def _known(named: Mapping[str, Mapping[Any, Expr]], batch: int, dims: Mapping[str, int]) -> dict[Any, int]:
    known: dict[Any, int] = {}
    for found in named.values():
        for name, expr in found.items():
            if name == "batch":
                known[expr] = batch
            elif isinstance(name, str) and name in dims:
                known[expr] = dims[name]
    return known


def _is_whole(graph: fx.Graph, source: fx.Node, sizes: Sizes) -> bool:
    """Whether an input decides what attention sees other than through what the model makes of tokens.

    Scores and biases made of hidden values, such as queries and keys, follow the tokens; a mask does not.
    """
    reached, hidden = {source}, {source} if _is_embedded(source, sizes) else set()
    for node in dependent(graph, source):
        given = [a for a in node.all_input_nodes if a in reached]
        reached.add(node)
        if any(a in hidden for a in given) or name_of(node) in _HIDES:
            hidden.add(node)
        if is_fused(node):
            mask = arguments_of(node).get("attn_mask")
            if mask in reached and mask not in hidden:
                return True
            continue
        paired = sum(map(sizes.carries, shape_of(value_of(node)))) > 1
        if paired and name_of(node) not in PRODUCTS and not all(a in hidden for a in given):
            return True
    return False


def _is_looked_up(source: fx.Node) -> bool:
    """Whether an input holds ids that a table is read at."""
    return any(
        (name_of(user) == "embedding" and user.args[1] is source) or (name_of(user) in MOVED and _is_looked_up(user))
        for user in source.users
    )


def _is_embedded(source: fx.Node, sizes: Sizes) -> bool:
    shape = shape_of(value_of(source))
    plain = len(shape) == 3 and not sizes.carries(shape[2])
    return plain and bool(value_of(source).is_floating_point())
