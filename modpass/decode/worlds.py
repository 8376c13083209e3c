"""Values that depend on no token, at the full length of the cache: computed once where nothing else decides them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from modpass.decode.names import free_stem
from modpass.mixing import name_of
from modpass.sizes import SEQUENCE, Refusal, Sizes
from modpass.symbols import expr_of, shape_of, value_of

__all__ = ["FullLength", "is_size", "size_at"]

LARGEST_TABLE = 2**24  # elements


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number made of sizes; one that is read from values is none."""
    if name_of(node) == "item":
        return False
    if isinstance(value_of(node), torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    if value_of(node) is not None or node.op != "call_function":
        return False
    return name_of(node) == "sym_size" or (bool(node.all_input_nodes) and all(map(is_size, node.all_input_nodes)))


def size_at(node: fx.Node, sizes: Sizes, sequence: int, known: dict[Any, int]) -> Any:
    """The number that ``node`` is where the sequence has this length; ``known`` holds the other free sizes.

    Raises:
        Refusal: it depends on a size that is not known.
    """
    value = value_of(node)
    if value is None and name_of(node) == "sym_size":
        source: Any = node.args[0]
        value = value_of(source).shape[node.args[1]]
    if value is None:
        plain = fx.map_arg(node.args, lambda a: size_at(a, sizes, sequence, known))
        return node.target(*plain)  # type: ignore[operator]
    expr = sizes.canonical(value.node.expr if hasattr(value, "node") else expr_of(value)).subs({SEQUENCE: sequence})
    expr = expr.subs(known)
    if expr.free_symbols:
        raise Refusal(f"the size {expr} is free (node {node.name}); give it in dims")
    return float(expr) if isinstance(value, torch.SymFloat) else int(expr)


class FullLength:
    """Copies what depends on no token into a new graph, with the sequence at its full length.

    What depends on no input at all is computed here and now, and becomes a table of the new module.
    """

    def __init__(
        self, graph: fx.Graph, root: torch.nn.Module, sizes: Sizes, sequence: int, known: dict[Any, int]
    ) -> None:
        self.graph, self.root, self.sizes, self.sequence, self.known = graph, root, sizes, sequence, known
        self.copies: dict[fx.Node, Any] = {}
        self.constants: dict[fx.Node, Any] = {}
        self.tables: dict[str, Tensor] = {}
        self.stem = free_stem(root, "table")

    def __call__(self, node: fx.Node) -> Any:
        """The node in the new graph, or a number."""
        if is_size(node):
            return self.size(node)
        if node not in self.copies:
            self.copies[node] = self._table(node) or self._copy(node)
        return self.copies[node]

    def size(self, node: fx.Node) -> Any:
        """A size at full length."""
        return size_at(node, self.sizes, self.sequence, self.known)

    def arguments(self, node: fx.Node, value: Callable[[fx.Node], Any]) -> tuple[Any, Any]:
        """A node's arguments with each node replaced."""
        return fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)

    def _copy(self, node: fx.Node) -> Any:
        if name_of(node) == "item":
            raise Refusal(f"{node.target} makes a number out of an input at full length (node {node.name})")
        if node.op == "get_attr":
            copied = self.graph.get_attr(str(node.target))
        elif node.op == "call_function":
            copied = self.graph.call_function(node.target, *self.arguments(node, self))  # type: ignore[arg-type]
        else:
            raise Refusal(f"{node.op} {node.target} is not known to depend on no token")
        copied.meta = {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}
        return copied

    def _table(self, node: fx.Node) -> fx.Node | None:
        if node.op != "call_function" or not any(map(self.sizes.carries, shape_of(value_of(node)))):
            return None
        value = self.constant(node)
        if value is None or value.numel() > LARGEST_TABLE:
            return None
        return self.graph.get_attr(self.name_table(value))

    def name_table(self, value: Tensor) -> str:
        """The attribute that holds this value; equal tables are kept once."""
        for name, other in self.tables.items():
            if other.dtype == value.dtype and torch.equal(other, value):
                return name
        name = f"{self.stem}_{len(self.tables)}"
        self.tables[name] = value.detach().clone()
        return name

    def constant(self, node: fx.Node) -> Any:
        """What a node is at full length if it depends on no input, else None."""
        if node not in self.constants:
            with torch.no_grad():
                self.constants[node] = self._compute(node)
        return self.constants[node]

    def _compute(self, node: fx.Node) -> Any:
        if is_size(node):
            return self.size(node)
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self.root)
        if node.op != "call_function" or any(self.constant(a) is None for a in node.all_input_nodes):
            return None
        args, kwargs = self.arguments(node, self.constant)
        try:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        except (IndexError, RuntimeError) as e:
            raise Refusal(f"{node.target} does not work for {self.sequence} tokens (node {node.name}): {e}") from e
