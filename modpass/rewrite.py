"""The only file that edits graphs: normalise after tracing, splice reopened blocks, outline a block's body."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import Tensor, fx, nn

from modpass.analysis import SEQUENCE, Analysis, canonical_arguments
from modpass.complex import without_complex
from modpass.dropout import AttentionDropout
from modpass.functional import Gather
from modpass.mixing import name_of
from modpass.prefix import without_prefix_cuts
from modpass.symbols import emit, expr_of, value_of

if TYPE_CHECKING:
    from modpass.reopen import Reopened

__all__ = [
    "Body",
    "Side",
    "copy_graph",
    "drop_inputs",
    "flat_stream",
    "normalise",
    "outline",
    "regroup",
    "replace_call",
    "retarget",
    "side_by_side",
    "splice",
    "summands",
    "switch_dropout",
    "undo_dropout",
]

aten = torch.ops.aten
_CHECKS = {
    "_assert_tensor_metadata",
    "_assert_scalar",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
    "_assert_async",
}
_LIKE = {
    "zeros_like": 0,
    "ones_like": 1,
    "full_like": None,
    "new_zeros": 0,
    "new_ones": 1,
    "new_full": None,
    "empty_like": 0,
    "new_empty": 0,
}


# Normalise


def normalise(graph: fx.Graph) -> None:
    """Drop the trace's own checks and strides, and say sizes by the inputs' sizes instead of by inner values."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and name_of(node) in _CHECKS:
            graph.erase_node(node)
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            # Whether a view is enough depends on strides, which depend on the attention kernel of the moment.
            node.target = aten.reshape.default
    without_complex(graph)
    without_prefix_cuts(graph)
    known = _known_sizes(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and name_of(node) in _LIKE:
            _make_full(graph, node, known)
    for node in list(graph.nodes):
        if node.op == "call_function" and name_of(node) == "sym_size" and node.all_input_nodes[0].op != "placeholder":
            _replace_size(graph, node, known)
    _fold_inverse(graph)
    _drop_dead(graph)


def _fold_inverse(graph: fx.Graph) -> None:
    """The inverse error function, which no exporter knows, of a constant: a quantile that a model works out."""
    module: Any = graph.owning_module
    for node in [n for n in graph.nodes if name_of(n) in ("erfinv", "special_erfinv")]:
        constant = _constant(module, node)
        if constant is not None:
            name = f"_{node.name}_constant"
            module.register_buffer(name, constant, persistent=False)
            with graph.inserting_before(node):
                folded = graph.get_attr(name)
            folded.meta = dict(node.meta)
            node.replace_all_uses_with(folded)


def _constant(module: Any, node: fx.Node) -> Any:
    """The value of a node that depends on constants alone, else None."""
    if node.op == "get_attr":
        value = _get(module, node.target)
        return value if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) else None
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    values = {a: _constant(module, a) for a in node.all_input_nodes}
    if any(v is None for v in values.values()):
        return None
    target: Any = node.target
    return target(*fx.map_arg(node.args, values.get), **fx.map_arg(node.kwargs, values.get))


def _known_sizes(graph: fx.Graph) -> dict[sympy.Expr, fx.Node]:
    """A node for each symbol that is the size of an input."""
    known: dict[sympy.Expr, fx.Node] = {}
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    last = inputs[-1] if inputs else None
    for node in inputs:
        value = value_of(node)
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            expr = expr_of(size)
            if expr.is_Symbol and expr not in known:
                assert last is not None
                with graph.inserting_after(last):
                    last = known[expr] = graph.call_function(aten.sym_size.int, (node, dim))
                known[expr].meta["val"] = size
    return known


def _make_full(graph: fx.Graph, node: fx.Node, known: dict[sympy.Expr, fx.Node]) -> None:
    """``ones_like(x)`` takes only x's shape: as ``full(shape)`` it depends on no token."""
    value, constant = value_of(node), _LIKE[name_of(node)]
    fill = node.args[-1] if constant is None else constant
    if not all(expr_of(s).free_symbols <= known.keys() for s in value.shape):
        return
    with graph.inserting_before(node):
        sizes = [_size(graph, s, known) for s in value.shape]
        full = graph.call_function(aten.full.default, (sizes, fill), {"dtype": value.dtype, "device": value.device})
    full.meta = dict(node.meta)
    node.replace_all_uses_with(full)
    graph.erase_node(node)


def _size(graph: fx.Graph, size: Any, known: dict[sympy.Expr, fx.Node]) -> fx.Node | int:
    found = emit(graph, expr_of(size), known)
    if isinstance(found, fx.Node):
        found.meta.setdefault("val", size)
    return found


def _replace_size(graph: fx.Graph, node: fx.Node, known: dict[sympy.Expr, fx.Node]) -> None:
    if not expr_of(value_of(node)).free_symbols <= known.keys():
        return
    with graph.inserting_before(node):
        size = _size(graph, value_of(node), known)
    if isinstance(size, fx.Node):
        node.replace_all_uses_with(size)
    else:
        _inline(node, size)
    graph.erase_node(node)


def _inline(node: fx.Node, constant: int) -> None:
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda n: constant if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: constant if n is node else n)


def drop_inputs(graph: fx.Graph, names: set[str]) -> None:
    """Drop the placeholders of constants: the trace has worked their values into the graph."""
    for node in list(graph.nodes):
        if node.op == "placeholder" and str(node.target) in names and not node.users:
            graph.erase_node(node)


def _drop_dead(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


# Reopened blocks


def splice(
    graph_module: fx.GraphModule, name: str, old: fx.Node, reopened: Reopened, moved: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Put a block's reopened graph in the place of the one with a fixed sequence; returns old -> new nodes."""
    graph, env = graph_module.graph, {k: moved.get(v, v) for k, v in reopened.outer.items()}
    prefix = name.partition("@")[0]
    with graph.inserting_before(old):
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
    old.replace_all_uses_with(env[reopened.output])
    _drop_dead(graph)
    return env


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
        _drop_dead(self.graph)
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
            if key in self.sides or self._is_owned(side) or self._is_size(node, side):
                continue
            self.sides[key] = self.graph.placeholder(f"side_{len(self.sides)}")
        for _, side in pairs:
            if self._is_owned(side):
                target = str(side.target).removeprefix(self.prefix)
                if target not in self.owned:
                    self.owned[target] = self.graph.placeholder(f"own_{len(self.owned)}")

    def _is_owned(self, node: fx.Node) -> bool:
        return node.op == "get_attr" and str(node.target).startswith(self.prefix)

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
        if self._is_owned(argument):
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


def copy_graph(graph_module: fx.GraphModule) -> fx.Graph:
    """A copy of a module's graph whose nodes may be changed; it refers to the same submodules."""
    graph = fx.Graph(owning_module=graph_module)
    graph.output(graph.graph_copy(graph_module.graph, {}))
    return graph


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
    _drop_dead(graph)
    return call


# Dropout and device


def switch_dropout(graph_module: fx.GraphModule) -> None:
    """Turn dropout operators, whose flag the trace froze, into modules that follow ``train()`` and ``eval()``."""
    makers: dict[str, Callable[[fx.Node], tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None]] = {
        "dropout": lambda n: (nn.Dropout(float(n.args[1])), (n.args[0],), {}),  # type: ignore[arg-type]
        "scaled_dot_product_attention": _attention_module,
    }
    count = 0
    for node in list(graph_module.graph.nodes):
        made = makers[name_of(node)](node) if node.op == "call_function" and name_of(node) in makers else None
        if made is None:
            continue
        module, args, kwargs = made
        name, count = f"_dropout_{count}", count + 1
        graph_module.add_module(name, module.train(graph_module.training))
        with graph_module.graph.inserting_before(node):
            call = graph_module.graph.call_module(name, args, kwargs)
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        graph_module.graph.erase_node(node)


def _attention_module(node: fx.Node) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None:
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    rate = given.pop("dropout_p", 0.0)
    tensors = tuple(given.pop(n) for n in ("query", "key", "value"))
    return (AttentionDropout(float(rate)), tensors, given) if rate else None


def undo_dropout(graph_module: fx.GraphModule) -> fx.Graph:
    """A copy of a module's graph as it is in eval mode, with plain operators where dropout modules were."""
    graph = copy_graph(graph_module)
    for node in list(graph.nodes):
        module = graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, nn.Dropout):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif isinstance(module, AttentionDropout):
            with graph.inserting_before(node):
                plain = graph.call_function(aten.scaled_dot_product_attention.default, node.args, node.kwargs)
            plain.meta = dict(node.meta)
            node.replace_all_uses_with(plain)
            graph.erase_node(node)
    return graph


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
