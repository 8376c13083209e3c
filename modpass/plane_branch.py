"""The MLP of a residual whose tokens lie in two dims, as those of an image do: ``[B, C, H, W]`` or ``[B, H, W, C]``.

What works on each place by itself (1 x 1 convolutions, linear layers, norms over channels) is the same on a sequence of
H * W tokens. Convolutions that come before it in the same branch stay outside, where every token takes part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from modpass.branches import upstream
from modpass.mixing import is_pointwise, name_of
from modpass.planes import Plane
from modpass.sizes import Refusal
from modpass.symbols import shape_of, value_of

__all__ = ["PlaneBranch", "plane_branch", "plane_sums"]

_PRODUCTS = {"linear", "conv2d", "convolution"}
_AS_IT_IS = {"dropout", "clone", "contiguous", "alias", "detach", "to", "_to_copy"}
_MLP = 2  # products: one that widens, and one back


@dataclass(frozen=True)
class PlaneBranch:
    """From a residual ``stream`` to its sum ``output``. nodes: the token-wise ones, in order; planes: where the stream,
    the output and every other input with a value per token have their tokens.
    """

    stream: fx.Node
    output: fx.Node
    nodes: tuple[fx.Node, ...]
    planes: dict[fx.Node, Plane]

    @property
    def others(self) -> tuple[fx.Node, ...]:
        """The inputs beside the stream that have a value per token."""
        return tuple(n for n in self.planes if n not in (self.stream, self.output))


def plane_branch(nodes: list[fx.Node]) -> PlaneBranch:
    """The one MLP among the nodes of a block whose tokens lie in two dims.

    One that reads the residual alone is preferred to one that reads what a convolution made of it.

    Raises:
        Refusal: there is none, or more than one.
    """
    _check_batch(nodes)
    found = [b for n in plane_sums(nodes) for b in _branches(n, nodes)]
    found = [b for b in found if not b.others] or found
    if len(found) == 1:
        return found[0]
    raise Refusal(
        f"it has {len(found)} branches that could be its mlp"
        if found
        else "it has no MLP, a residual branch that ends in two products that are seen to work on each place by itself"
    )


def plane_sums(nodes: list[fx.Node]) -> list[fx.Node]:
    """The sums among nodes that may be of a residual whose tokens lie in two dims."""
    return [n for n in nodes if name_of(n) in ("add", "add_") and len(shape_of(value_of(n))) == 4]


def _check_batch(nodes: list[fx.Node]) -> None:
    """The first dim of a stream that is no sequence counts rows: it is the first of an input, or made of it."""
    inputs = [shape_of(value_of(n)) for n in nodes[0].graph.nodes if n.op == "placeholder"]
    rows = {symbol for shape in inputs for symbol in (shape[0].free_symbols if shape else ())}
    for node in (n for n in nodes if len(shape_of(value_of(n))) == 4):
        first = shape_of(value_of(node))[0]
        if not first.is_Integer and not first.free_symbols & rows:
            raise Refusal(f"the first dim of its stream, {first}, is not the batch of an input (node {node.name})")


def _branches(total: fx.Node, nodes: list[fx.Node]) -> list[PlaneBranch]:
    """The branch that a sum adds to a residual, read channels first or last; at most one of them has products."""
    pair = [a for a in total.args if isinstance(a, fx.Node) and shape_of(value_of(a)) == shape_of(value_of(total))]
    found: list[PlaneBranch] = []
    for stream, branch in (pair, pair[::-1]) if len(pair) == 2 and not total.kwargs else ():
        if stream not in upstream([branch], [*nodes, stream]) or not _passes_all(stream, total, nodes):
            continue
        for plane in (Plane((2, 3)), Plane((1, 2))):
            walk = _Walk(total, stream, plane, set(nodes))
            order = tuple(n for n in nodes if n in walk.inner)
            if sum(name_of(n) in _PRODUCTS for n in order) >= _MLP and not _read_elsewhere(order, total):
                found.append(PlaneBranch(stream, total, order, {stream: plane, total: plane, **walk.others}))
    return found


def _passes_all(stream: fx.Node, total: fx.Node, nodes: list[fx.Node]) -> bool:
    """Whether all that the block makes of the stream goes through the sum."""
    own, made = {total} | upstream([total], nodes, stream), {stream}
    for node in nodes:
        if isinstance(value_of(node), Tensor) and any(a in made for a in node.all_input_nodes):
            if node not in own:
                return False
            made |= {node} - {total}
    return all(u in own or not _is_read(u) for n in made - {stream} for u in n.users)


def _is_read(user: fx.Node) -> bool:
    """Whether a node takes values, and not sizes alone."""
    return user.op == "output" or isinstance(value_of(user), Tensor)


def _read_elsewhere(branch: tuple[fx.Node, ...], total: fx.Node) -> bool:
    """Whether a product, or what is made of it, is needed outside too, where every token would take part again."""
    made: set[fx.Node] = set()
    for node in branch:
        if name_of(node) in _PRODUCTS or any(a in made for a in node.all_input_nodes):
            made.add(node)
    return any(u not in branch for n in made - {total} for u in n.users if _is_read(u))


class _Walk:
    """Back from a sum through all that works on each place by itself, to the stream or to a value made otherwise."""

    def __init__(self, total: fx.Node, stream: fx.Node, plane: Plane, inside: set[fx.Node]) -> None:
        self.inner: dict[fx.Node, Plane] = {}
        self.others: dict[fx.Node, Plane] = {}
        frontier = [(total, plane)]
        while frontier:
            node, own = frontier.pop()
            seen = self.inner.get(node) or self.others.get(node)
            if seen is not None and seen != own:
                self.inner.clear()  # read in two layouts
                return
            inputs = _inputs(node, own) if node in inside and node is not stream else None
            if inputs is not None:
                self.inner[node] = own
                frontier += inputs.items()
            elif node is not stream:
                self.others[node] = own
            elif own != plane:
                self.inner.clear()
                return


def _inputs(node: fx.Node, plane: Plane) -> dict[fx.Node, Plane] | None:
    """The inputs of a token-wise node that have tokens, and where; None where it is no such node."""
    first: Any = node.args[0] if node.args else None
    if node.op != "call_function" or not isinstance(first, fx.Node):
        return None
    name, channel = name_of(node), plane.order[3]
    if name in _AS_IT_IS:
        return {first: plane}
    if is_pointwise(node):
        return _broadcast(node, plane)
    if name in ("permute", "transpose"):
        order = list(range(4))
        if name == "permute":
            given: Any = node.args[1]
            order = [d % 4 for d in given]
        else:
            a, b = (int(d) % 4 for d in node.args[1:3])  # type: ignore[arg-type]
            order[a], order[b] = order[b], order[a]
        height, width = (order[p] for p in plane.places)
        return {first: Plane((height, width))} if order[0] == 0 else None
    if name == "linear":
        return {first: plane} if channel == 3 else None
    if name in ("layer_norm", "rms_norm"):
        over: Any = node.args[1]
        return {first: plane} if channel == 3 and len(over) == 1 else None
    if name == "batch_norm":
        return {first: plane} if channel == 1 and node.args[5] is False else None
    if name in ("conv2d", "convolution"):
        return {first: plane} if channel == 1 and _is_product(node) else None
    return None


def _broadcast(node: fx.Node, plane: Plane) -> dict[fx.Node, Plane] | None:
    """Operands of the full shape have tokens; those of size 1 at every place have none; any other is not known."""
    found, out = dict[fx.Node, Plane](), shape_of(value_of(node))
    for operand in node.all_input_nodes:
        if not isinstance(value_of(operand), Tensor):
            return None
        shape = shape_of(value_of(operand))
        padded = (*(1,) * (4 - len(shape)), *shape)
        if padded == out and operand.op != "get_attr":
            found[operand] = plane
        elif len(padded) > 4 or any(padded[p] != 1 for p in plane.places):
            return None
    return found


def _is_product(node: fx.Node) -> bool:
    """A convolution of one place at a time: with a kernel of 1 and no padding, only a stride could move places."""
    x, y, weight = (shape_of(value_of(n)) for n in (node.args[0], node, node.args[1]) if isinstance(n, fx.Node))
    padding: Any = node.args[4] if len(node.args) > 4 else 0
    return tuple(weight[2:]) == (1, 1) and x[2:] == y[2:] and padding in (0, [0], [0, 0], "same", "valid")
