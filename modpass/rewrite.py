"""Edit a normalised graph: splice reopened blocks, outline a block's body, put a call in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import Tensor, fx, nn

from modpass.analysis import Analysis, canonical_arguments
from modpass.functional import Gather
from modpass.mixing import name_of
from modpass.normalise import drop_dead
from modpass.sizes import SEQUENCE
from modpass.symbols import emit, expr_of, value_of

if TYPE_CHECKING:
    from modpass.reopen import Reopened

__all__ = [
    "Body",
    "Side",
    "drop_inputs",
    "flat_stream",
    "outline",
    "regroup",
    "replace_call",
    "retarget",
    "side_by_side",
    "splice",
    "summands",
]

aten = torch.ops.aten


def drop_inputs(graph: fx.Graph, names: set[str]) -> None:
    """Drop the placeholders of constants: the trace has worked their values into the graph."""
    for node in list(graph.nodes):
        if node.op == "placeholder" and str(node.target) in names and not node.users:
            graph.erase_node(node)


# Reopened blocks


def splice(
    graph_module: fx.GraphModule, name: str, old: fx.Node, reopened: Reopened, moved: dict[fx.Node, fx.Node]
) -> tuple[dict[fx.Node, fx.Node], fx.Node]:
    """Put a block's reopened graph in the place of the one with a fixed sequence.

    Returns old -> new nodes, and the new one that stands for ``old``.
    """
    graph, env = graph_module.graph, {k: moved.get(v, v) for k, v in reopened.outer.items()}
    prefix = name.partition("@")[0]
    stream, plane = env[reopened.analysis.stream], reopened.plane
    with graph.inserting_before(old):
        for placeholder, own in reopened.planes.items():
            env[placeholder] = own.flat(graph, env[placeholder])
            env[placeholder].meta = dict(placeholder.meta)
        for node in reopened.graph_module.graph.nodes:
            if node.op == "get_attr":
                target = f"{prefix}.{node.target}"
                if not _has(graph_module, target):
                    _adopt(graph_module, target, _get(reopened.graph_module, node.target))
                env[node] = graph.get_attr(target)
                env[node].meta = dict(node.meta)
            elif node.op == "call_function":
                env[node] = graph.node_copy(node, lambda n: env[n])
                env[node].meta = {**node.meta, "nn_module_stack": old.meta.get("nn_module_stack")}
        result = env[reopened.output]
        if plane is not None:
            result = plane.laid_out_like(graph, result, stream)
            result.meta = dict(old.meta)
    old.replace_all_uses_with(result)
    drop_dead(graph)
    return env, result


def _has(module: nn.Module, path: str) -> bool:
    try:
        _get(module, path)
    except AttributeError:
        return False
    return True


def _get(module: nn.Module, path: Any) -> Any:
    for part in str(path).split("."):
        module = getattr(module, part)
    return module


def _adopt(module: nn.Module, path: str, value: Tensor) -> None:
    parent, _, leaf = path.rpartition(".")
    for part in filter(None, parent.split(".")):
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = getattr(module, part)
    if isinstance(value, nn.Parameter):
        module.register_parameter(leaf, value)
    else:
        module.register_buffer(leaf, value, persistent=False)


# Outline


@dataclass(frozen=True)
class Side:
    """A side input of a routed block: the outer node, and how it follows the chosen tokens (None: whole)."""

    node: fx.Node
    gather: Gather | None


@dataclass(frozen=True)
class Body:
    """A block on the chosen tokens alone: ``graph_module(x_k, *sides, *owned)``.

    owned: parameters and buffers under the block's own path, by their path relative to it.
    """

    graph_module: fx.GraphModule
    sides: tuple[Side, ...]
    owned: tuple[str, ...]


def outline(name: str, analysis: Analysis) -> Body:
    """Copy the token-dependent nodes of a block into a graph of their own, in which the sequence is k."""
    return _Outliner(name, analysis).body()


class _Outliner:
    def __init__(self, name: str, analysis: Analysis) -> None:
        self.prefix, self.analysis = f"{name}.", analysis
        self.graph = fx.Graph()
        x = self.graph.placeholder("x")
        x.meta["val"] = value_of(analysis.stream)
        self.env: dict[fx.Node, fx.Node] = {analysis.stream: x}
        self.sizes: dict[sympy.Expr, fx.Node] = {}
        self.sides: dict[tuple[fx.Node, Gather | None], fx.Node] = {}
        self.owned: dict[str, fx.Node] = {}

    def body(self) -> Body:
        inner = set(self.analysis.tokens)
        self._declare(inner)
        x = self.env[self.analysis.stream]
        order, seq_dim = self.analysis.order, self.analysis.seq_dim if self.analysis.order is None else 1
        batch_dim = 1 - seq_dim
        self.sizes = {
            self.analysis.sizes.batch: self.graph.call_function(aten.sym_size.int, (x, batch_dim)),
            SEQUENCE: self.graph.call_function(aten.sym_size.int, (x, seq_dim)),
        }
        if order is not None:
            self.env[self.analysis.stream] = side_by_side(self.graph, x, self.analysis)
        for node in self.analysis.tokens:
            self._copy(node)
        y = self.env[self.analysis.output]
        self.graph.output(y if order is None else flat_stream(self.graph, y, order))
        drop_dead(self.graph)
        self.graph.lint()
        sides = tuple(Side(node, gather) for node, gather in self.sides)
        return Body(fx.GraphModule(nn.Module(), self.graph, "Body"), sides, tuple(self.owned))

    def _declare(self, inner: set[fx.Node]) -> None:
        """Placeholders: the side inputs first, then the block's own parameters."""
        pairs = [
            (n, a)
            for n in self.analysis.tokens
            for a in n.all_input_nodes
            if a not in inner and a is not self.analysis.stream
        ]
        for node, side in pairs:
            key = side, self.analysis.gathers.get((node, side))
            if key in self.sides or self._is_owned(node, side) or self._is_size(node, side):
                continue
            self.sides[key] = self.graph.placeholder(f"side_{len(self.sides)}")
        for node, side in pairs:
            if self._is_owned(node, side):
                target = str(side.target).removeprefix(self.prefix)
                if target not in self.owned:
                    self.owned[target] = self.graph.placeholder(f"own_{len(self.owned)}")

    def _is_owned(self, consumer: fx.Node, node: fx.Node) -> bool:
        """Whether a weight comes with the block; a table with a row for each token follows them as a side input."""
        follows = (consumer, node) in self.analysis.gathers
        return node.op == "get_attr" and str(node.target).startswith(self.prefix) and not follows

    def _is_size(self, consumer: fx.Node, node: fx.Node) -> bool:
        """A size used as a shape becomes k inside; one used as a number keeps its value over the full sequence."""
        if not isinstance(value_of(node), torch.SymInt):
            return False
        expr = self.analysis.sizes.canonical(expr_of(value_of(node)))
        as_number = any(kind == "number" and value is node for kind, value in canonical_arguments(consumer))
        return not as_number and expr.free_symbols <= {SEQUENCE, self.analysis.sizes.batch}

    def _copy(self, node: fx.Node) -> None:
        copied = self.graph.node_copy(node, lambda a: self._argument(node, a))
        copied.meta = {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace", "val")}
        self.env[node] = copied

    def _argument(self, consumer: fx.Node, argument: fx.Node) -> Any:
        if argument in self.env:
            return self.env[argument]
        if self._is_owned(consumer, argument):
            return self.owned[str(argument.target).removeprefix(self.prefix)]
        if self._is_size(consumer, argument):
            expr = self.analysis.sizes.canonical(expr_of(value_of(argument)))
            return emit(self.graph, expr, self.sizes)
        return self.sides[argument, self.analysis.gathers.get((consumer, argument))]


def regroup(total: fx.Node, stream: fx.Node, terms: tuple[fx.Node, ...]) -> fx.Node:
    """Make ``stream + terms`` the first part of a sum of all of them and more; returns the node of that part.

    Every other term is added to it one by one; ``total`` itself stays the sum.
    """
    graph, rest, partial = total.graph, list(summands(total)), stream
    for term in (stream, *terms):
        rest.remove(term)
    with graph.inserting_before(total):
        for term in terms:
            partial = _sum(graph, partial, term, total)
        first = partial
        for term in rest[:-1]:
            partial = _sum(graph, partial, term, total)
    total.target, total.args, total.kwargs = aten.add.Tensor, (partial, rest[-1]), {}
    return first


def _sum(graph: fx.Graph, a: fx.Node, b: fx.Node, like: fx.Node) -> fx.Node:
    node = graph.call_function(aten.add.Tensor, (a, b))
    node.meta = dict(like.meta)
    return node


def summands(total: fx.Node) -> list[fx.Node]:
    """The terms of a sum of sums; what does nothing, such as dropout at a rate of 0, is looked through."""
    if name_of(total) in ("clone", "alias") or (name_of(total) == "dropout" and not total.args[1]):
        return summands(total.all_input_nodes[0])
    if name_of(total) not in ("add", "add_") or total.kwargs or not all(isinstance(a, fx.Node) for a in total.args):
        return [total]
    parts: Any = total.args
    return [t for a in parts for t in (summands(a) if _is_inner(a, total) else [a])]


def _is_inner(node: fx.Node, total: fx.Node) -> bool:
    alike: bool = getattr(value_of(node), "shape", None) == value_of(total).shape
    return set(node.users) == {total} and alike and node.op == "call_function"


def flat_stream(graph: fx.Graph, x: fx.Node, order: tuple[int, ...]) -> fx.Node:
    """Several streams side by side as one ``[B, S, width]``, at the graph's insert point."""
    return graph.call_function(aten.flatten.using_ints, (graph.call_function(aten.permute.default, (x, order)), 2))


def side_by_side(graph: fx.Graph, x: fx.Node, analysis: Analysis) -> fx.Node:
    """What ``flat_stream`` flattened, as the block's own code has it."""
    order, shape = analysis.order or (), value_of(analysis.stream).shape
    apart = graph.call_function(aten.unflatten.int, (x, 2, [int(shape[i]) for i in order[2:]]))
    return graph.call_function(aten.permute.default, (apart, [order.index(i) for i in range(len(order))]))


def replace_call(graph: fx.Graph, target: str, analysis: Analysis, arguments: tuple[fx.Node | None, ...]) -> fx.Node:
    """Put a call of the routed block in the place of the node that computed the block's output."""
    output, stream = analysis.output, arguments[0]
    with graph.inserting_before(output):
        if analysis.order is None or stream is None:
            call = graph.call_module(target, arguments)
        else:
            flat = flat_stream(graph, stream, analysis.order)
            call = side_by_side(graph, graph.call_module(target, (flat, *arguments[1:])), analysis)
    call.meta = dict(output.meta)
    output.replace_all_uses_with(call)
    drop_dead(graph)
    return call


def retarget(graph_module: fx.GraphModule, device: torch.device) -> None:
    """Let the graph make its own tensors (positions, masks) on ``device``."""
    changed = False
    for node in graph_module.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device) and node.kwargs["device"] != device:
            node.kwargs = {**node.kwargs, "device": device}
            changed = True
        if any(isinstance(a, torch.device) and a != device for a in node.args):
            node.args = tuple(device if isinstance(a, torch.device) else a for a in node.args)
            changed = True
    if changed:
        graph_module.recompile()
