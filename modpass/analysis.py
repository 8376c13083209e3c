"""What a block's region does with its tokens: which values depend on them, and whether they meet in attention alone.

Nothing here changes a graph. A region that cannot be routed is a ``Refusal`` with a reason to act on.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from modpass.functional import Gather
from modpass.gathers import gather_of
from modpass.mixing import MOVED, UNIFORM, Unknown, mixing_reason, name_of
from modpass.region import Region
from modpass.sizes import Refusal, Sizes
from modpass.sparse import picks_keys
from modpass.symbols import Expr, shape_of, value_of

__all__ = [
    "Analysis",
    "analyse",
    "analyse_part",
    "canonical_arguments",
    "is_uniform",
    "merges_rows",
    "sketch",
]


_BROUGHT = Gather(3, 0, True, (1,))


@dataclass
class Analysis:
    """A region that can be routed.

    stream, output: the residual stream in and out; seq_dim: its sequence dim; order: for a stream of more than three
    dims (several residual streams side by side), the permutation that puts batch and sequence first. tokens: the
    nodes that depend on the tokens, in order; the rest is hoisted. gathers: how each (consumer, side input) pair
    follows the chosen tokens; a pair that is absent passes whole. others: side inputs ``[B, S, ...]`` that the tokens
    bring along: what is made of them is of the tokens too. unknown: nodes of operators that only a check on values can
    tell to keep tokens apart.
    """

    stream: fx.Node
    output: fx.Node
    sizes: Sizes
    seq_dim: int
    width: int
    tokens: list[fx.Node]
    hoisted: list[fx.Node]
    gathers: dict[tuple[fx.Node, fx.Node], Gather] = field(default_factory=dict)
    unknown: list[fx.Node] = field(default_factory=list)
    order: tuple[int, ...] | None = None
    others: tuple[fx.Node, ...] = ()

    @property
    def fixed(self) -> bool:
        """Whether the trace fixed the sequence length to a number."""
        return bool(self.sizes.sequence.is_Integer)


def analyse(nodes: list[fx.Node]) -> Analysis:
    """Analyse one region.

    Raises:
        Refusal: with the reason.
    """
    region = Region(nodes)
    stream, output = region.residual_stream()
    several = len(shape_of(value_of(stream))) > 3
    sizes, seq_dim = region.sizes_of_several(stream) if several else region.sizes(stream)
    return _complete(region, _begin(stream, output, sizes, seq_dim))


def analyse_part(
    nodes: list[fx.Node],
    stream: fx.Node,
    output: fx.Node,
    sizes: Sizes,
    seq_dim: int,
    others: Collection[fx.Node] = (),
) -> Analysis:
    """Analyse the nodes between two residual values of a block.

    others: values ``[B, S, ...]`` beside the stream that the tokens bring along.

    Raises:
        Refusal: with the reason.
    """
    return _complete(Region(nodes), replace(_begin(stream, output, sizes, seq_dim), others=tuple(others)))


def sketch(nodes: list[fx.Node]) -> Analysis:
    """Stream, output, sizes and token nodes of a region that need not be one to route, to look for its branches.

    Where attention runs over no dim of the stream, the batch is the first.

    Raises:
        Refusal: it has no residual stream, or none whose batch and sequence can be told.
    """
    region = Region(nodes)
    stream, output = region.residual_stream()
    first, second, *others = shape_of(value_of(stream))
    if len(others) > 1:
        sizes, seq_dim = region.sizes_of_several(stream)
    else:
        try:
            sizes, seq_dim = region.sizes(stream)
        except Refusal:
            if first == second:
                raise
            sizes, seq_dim = Sizes(first, second), 1
    return replace(_begin(stream, output, sizes, seq_dim), tokens=region.dependent(stream, strict=False))


def _begin(stream: fx.Node, output: fx.Node, sizes: Sizes, seq_dim: int) -> Analysis:
    shape = shape_of(value_of(stream))
    order = None if len(shape) == 3 else _front(shape, sizes)
    width = shape[-1] if order is None else sympy.prod([shape[i] for i in order[2:]])
    if not width.is_Integer:
        raise Refusal(f"the stream's width is {width}, not a fixed number")
    return Analysis(stream, output, sizes, seq_dim, int(width), [], [], order=order)


def _complete(region: Region, found: Analysis) -> Analysis:
    """What the region does with its tokens; left out where the trace fixed the sequence."""
    if found.fixed:
        return found
    stream, sizes = found.stream, found.sizes
    found.tokens = region.dependent(stream, *found.others)
    inner = set(found.tokens)
    uniform = region.uniform()
    made = _needed(found.tokens, {n for n in uniform if any(map(sizes.carries, shape_of(value_of(n))))}, uniform)
    found.tokens = [n for n in region.nodes if n in inner or n in made]
    inner |= made
    found.hoisted = [
        n for n in region.nodes if n not in inner and isinstance(value_of(n), Tensor) and n.op != "get_attr"
    ]
    region.check_outputs(inner - made, found.output)
    for node in (n for n in found.tokens if n not in made):
        _check_node(node, inner, found)
    return found


def _check_node(node: fx.Node, inner: set[fx.Node], found: Analysis) -> None:
    """Note how a node's side inputs follow the tokens; refuse one that mixes them."""
    sizes = found.sizes
    _check_sizes(node, sizes)
    reason = None
    if not picks_keys(node, sizes.carries):
        reason = mixing_reason(node, sizes.carries, sizes.is_batch) or merges_rows(node, sizes)
    if isinstance(reason, Unknown):
        found.unknown.append(node)
    elif reason:
        raise Refusal(f"{reason} (node {node.name})")
    for side in _sides(node, inner, found.stream):
        gather = _BROUGHT if side in found.others else gather_of(node, side, sizes)
        if gather is not None:
            found.gathers[node, side] = gather


def _front(shape: tuple[Expr, ...], sizes: Sizes) -> tuple[int, ...]:
    first = [shape.index(sizes.batch), shape.index(sizes.sequence)]
    return (*first, *(i for i in range(len(shape)) if i not in first))


def is_uniform(node: fx.Node) -> bool:
    """Whether a tensor has one value in every place by the way it is made."""
    tensors = [a for a in node.all_input_nodes if isinstance(value_of(a), Tensor)]
    if name_of(node) in UNIFORM:
        return not tensors
    return name_of(node) in MOVED and bool(tensors) and all(map(is_uniform, tensors))


def _needed(tokens: list[fx.Node], sized: set[fx.Node], uniform: set[fx.Node]) -> set[fx.Node]:
    """The uniform tensors of token length that token nodes read, and what those are made from."""
    needed: set[fx.Node] = set()
    frontier = [a for n in tokens for a in n.all_input_nodes if a in sized]
    while frontier:
        node = frontier.pop()
        if node not in needed:
            needed.add(node)
            frontier += [a for a in node.all_input_nodes if a in uniform]
    return needed


def _check_sizes(node: fx.Node, sizes: Sizes) -> None:
    values = value_of(node) if isinstance(value_of(node), tuple | list) else [value_of(node)]
    for value in values:
        for size in shape_of(value):
            if not sizes.is_parametric(size) and not _appends_sinks(node, size, sizes):
                raise Refusal(
                    f"{node.target} makes a dim of {sizes.canonical(size)}, which is not the sequence S "
                    f"(node {node.name})"
                )


def merges_rows(node: fx.Node, sizes: Sizes) -> str | None:
    """Rows of the batch stacked by ``cat`` do not lie where a gather by row looks for them."""
    if name_of(node) not in ("cat", "concat", "stack"):
        return None
    before = {s for a in node.all_input_nodes for s in shape_of(value_of(a)) if sizes.is_batch(s)}
    after = {s for s in shape_of(value_of(node)) if sizes.is_batch(s)}
    return f"{node.target} stacks rows of the batch" if after - before else None


def _appends_sinks(node: fx.Node, size: Expr, sizes: Sizes) -> bool:
    """Attention scores with keys appended that are no tokens, and what is computed of them."""
    if not sizes.surplus(size):
        return False
    if name_of(node) in ("cat", "concat"):
        parts: Any = node.args[0]
        return any(map(sizes.carries, shape_of(value_of(parts[0]))[:-1])) and not any(
            sizes.carries(shape_of(value_of(p))[-1]) for p in parts[1:]
        )
    return any(size in shape_of(value_of(a)) for a in node.all_input_nodes)


def _sides(node: fx.Node, inner: set[fx.Node], stream: fx.Node) -> list[fx.Node]:
    return [a for a in node.all_input_nodes if a not in inner and a is not stream and isinstance(value_of(a), Tensor)]


def canonical_arguments(node: fx.Node) -> list[tuple[str, Any]]:
    """A node's arguments with the type that the operator's schema gives each."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return [("Any", a) for a in [*node.args, *node.kwargs.values()]]
    types = {a.name: str(a.type) for a in target._schema.arguments}
    positional = zip((str(a.type) for a in target._schema.arguments), node.args, strict=False)
    return [*positional, *((types[k], v) for k, v in node.kwargs.items())]
