"""A block whose sequence the trace fixed to a number is traced once more, alone, with its stream free.

A vision transformer's 257 tokens follow from its image size, so the whole model's graph holds the number itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from modpass.analysis import Analysis, analyse, analyse_part
from modpass.errors import TraceError
from modpass.mixing import name_of
from modpass.normalise import normalise
from modpass.program import experts_per_token, export_program
from modpass.rewrite import Body, outline
from modpass.runs import Runs
from modpass.sizes import Refusal, Sizes
from modpass.symbols import hint_of, shape_of, value_of
from modpass.tracing import Traced

__all__ = ["Reopened", "Reopener"]


@dataclass(frozen=True)
class Reopened:
    """A block's own graph, and which node of the whole model's graph each of its placeholders stands for.

    replaced: the node whose value a part of the block computes; None: it is the whole block.
    """

    graph_module: fx.GraphModule = field(repr=False)
    outer: dict[fx.Node, fx.Node] = field(repr=False)
    output: fx.Node = field(repr=False)
    analysis: Analysis = field(repr=False)
    replaced: fx.Node | None = field(default=None, repr=False)


class Reopener:
    """Traces single blocks of one traced model, from the inputs they get in a run on its example inputs."""

    def __init__(self, traced: Traced) -> None:
        self.traced, self.runs = traced, Runs(traced)

    def reopen(self, name: str, nodes: list[fx.Node], fixed: Analysis) -> Reopened:
        """Trace the block ``name`` with a free sequence.

        Raises:
            Refusal: there is no module to trace, or its sequence stays fixed.
        """
        if self.traced.module is None:
            raise Refusal(
                f"the trace fixed its sequence to {fixed.sizes.sequence}; give the nn.Module, or export "
                "with a dynamic sequence"
            )
        block = self.traced.module.get_submodule(name.partition("@")[0])
        if name not in self.runs.plain.calls:
            raise Refusal(
                f"its sequence is fixed to {fixed.sizes.sequence} and it is a list of modules, which cannot be traced "
                "alone; give it a forward"
            )
        args, kwargs = self.runs.plain.calls[name]
        try:
            with experts_per_token(self.traced.module):
                graph_module = export_program(block, args, kwargs).module(check_guards=False)
            normalise(graph_module.graph)
        except TraceError as e:
            raise Refusal(f"its sequence is fixed to {fixed.sizes.sequence} and it cannot be traced alone: {e}") from e
        outer = self._outer(name, graph_module, nodes)
        inner = [n for n in graph_module.graph.nodes if n.op == "call_function"]
        found = analyse(inner)
        if found.fixed:
            raise Refusal(f"its sequence stays fixed to {found.sizes.sequence} when it is traced alone")
        return Reopened(graph_module, outer, found.output, found)

    def reopen_part(self, name: str, fixed: Analysis) -> Reopened:
        """Trace a part of the block ``name`` with a free sequence; ``fixed`` has its stream, output and tokens.

        Raises:
            Refusal: it cannot be traced, its sequence stays fixed, or tokens meet in it.
        """
        body = outline(name, fixed)
        outer = [fixed.stream, *(s.node for s in body.sides)]
        block = self.traced.graph_module.get_submodule(name.partition("@")[0])
        try:
            program = export_program(_with_own(body, block), tuple(map(_example, outer)), {})
            graph_module = program.module(check_guards=False)
            normalise(graph_module.graph)
        except TraceError as e:
            raise Refusal(f"its sequence is fixed to {fixed.sizes.sequence} and it cannot be traced alone: {e}") from e
        graph = graph_module.graph
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        output: Any = next(n for n in graph.nodes if n.op == "output").args[0]
        output = output[0] if isinstance(output, tuple | list) else output
        shape = shape_of(value_of(placeholders[0]))
        sizes = Sizes(shape[1 - fixed.seq_dim], shape[fixed.seq_dim])
        inner = [n for n in graph.nodes if n.op == "call_function"]
        found = analyse_part(inner, placeholders[0], output, sizes, fixed.seq_dim)
        if found.fixed:
            raise Refusal(f"its sequence stays fixed to {found.sizes.sequence} when it is traced alone")
        return Reopened(graph_module, dict(zip(placeholders, outer, strict=True)), output, found, fixed.output)

    def inputs(self, name: str) -> list[Any]:
        """The values that the block ``name`` got in a run on the example inputs, as its own graph takes them."""
        return pytree.tree_leaves(self.runs.plain.calls[name])

    def _outer(self, name: str, graph_module: fx.GraphModule, nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Match the block's inputs with nodes of the whole graph by their values on the example inputs."""
        inside = set(nodes)
        sources = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
        placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
        matched: dict[fx.Node, fx.Node] = {}
        for place, placeholder in enumerate(placeholders):
            if placeholder.users:
                matched[placeholder] = self._source(name, placeholder.name, place, sources)
        return matched

    def _source(self, name: str, label: str, place: int, sources: list[fx.Node]) -> fx.Node:
        """The node that gives a block its input at ``place``."""
        found = self.runs.plain.alike(sources, name, place)
        if not found:
            raise Refusal(f"its input '{label}' is not found in the whole model's graph")
        if len(found) > 1:  # such as modulations that start at zero
            found = self.runs.jittered.alike(found, name, place) or found
        origins = [_origins(n) for n in found]
        if any(o != origins[0] for o in origins):
            names = ", ".join(n.name for n in found)
            raise Refusal(
                f"its input '{label}' could be any of {names}, which are equal on the example inputs; give example "
                "inputs in which they differ"
            )
        return found[0]


def _with_own(body: Body, block: nn.Module) -> fx.GraphModule:
    """A body that reads the block's own parameters from it, in place of taking them."""
    old, graph = body.graph_module.graph, fx.Graph()
    placeholders = [n for n in old.nodes if n.op == "placeholder"]
    env = {n: graph.placeholder(n.name) for n in placeholders[: 1 + len(body.sides)]}
    env |= {n: graph.get_attr(path) for n, path in zip(placeholders[len(env) :], body.owned, strict=True)}
    graph.output(graph.graph_copy(old, env))
    return fx.GraphModule(block, graph)


def _example(node: fx.Node) -> Tensor:
    """A tensor of the size that a node's value had in the example inputs."""
    value = value_of(node)
    shape = [hint_of(size) or 1 for size in value.shape]
    return torch.zeros(shape, dtype=value.dtype, device=value.device)


def _origins(node: fx.Node) -> set[fx.Node]:
    """The model's inputs whose values, not merely sizes, a node depends on."""
    found, frontier, seen = set(), [node], {node}
    while frontier:
        n = frontier.pop()
        if n.op == "placeholder":
            found.add(n)
        steps = [a for a in n.all_input_nodes if a not in seen and name_of(n) != "sym_size"]
        seen.update(steps)
        frontier += steps
    return found
