"""A block whose sequence the trace fixed to a number is traced once more, alone, with its stream free.

A vision transformer's 257 tokens follow from its image size, so the whole model's graph holds the number itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from modpass.analysis import Analysis, analyse, analyse_part
from modpass.errors import TraceError
from modpass.mixing import name_of
from modpass.normalise import normalise
from modpass.plane_branch import PlaneBranch
from modpass.planes import Plane
from modpass.program import experts_per_token, export_program
from modpass.rewrite import Body, outline
from modpass.runs import Runs
from modpass.sizes import SEQUENCE, Refusal, Sizes
from modpass.symbols import expr_of, hint_of, shape_of, value_of
from modpass.tracing import Traced

__all__ = ["Reopened", "Reopener"]


@dataclass(frozen=True)
class Reopened:
    """A block's own graph, and which node of the whole model's graph each of its placeholders stands for.

    replaced: the node whose value a part of the block computes; None: it is the whole block. planes: of placeholders
    whose tokens the whole model has in two dims and this graph in one, where it has them.
    """

    graph_module: fx.GraphModule = field(repr=False)
    outer: dict[fx.Node, fx.Node] = field(repr=False)
    output: fx.Node = field(repr=False)
    analysis: Analysis = field(repr=False)
    replaced: fx.Node | None = field(default=None, repr=False)
    planes: Mapping[fx.Node, Plane] = field(default_factory=dict, repr=False)

    @property
    def plane(self) -> Plane | None:
        """Where the whole model has the tokens of the stream, if in two dims."""
        return self.planes.get(self.analysis.stream)

    def given(self, values: Mapping[fx.Node, Any]) -> list[Any]:
        """The values of the placeholders, from those of the whole model's nodes."""
        flat = {p: plane.flat_value for p, plane in self.planes.items()}
        return [flat[p](values[n]) if p in flat else values[n] for p, n in self.outer.items()]


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
        body = outline(name.partition("@")[0], fixed)
        outer = [fixed.stream, *(s.node for s in body.sides)]
        part = _with_own(body, self._holder(name), {})
        return self._reopened(part, outer, list(map(_example, outer)), fixed.output, fixed.seq_dim, {})

    def reopen_plane(self, name: str, branch: PlaneBranch) -> Reopened:
        """Trace a branch of the block ``name`` whose tokens lie in two dims as one on a free sequence.

        Raises:
            Refusal: it cannot be traced so, or tokens meet in it.
        """
        stream, planes = branch.stream, branch.planes
        sizes = Sizes(shape_of(value_of(stream))[0], SEQUENCE)
        body = outline(name.partition("@")[0], Analysis(stream, branch.output, sizes, 1, 0, list(branch.nodes), []))
        outer = [stream, *(s.node for s in body.sides)]
        examples = [planes[n].flat_value(_example(n)) if n in planes else _example(n) for n in outer]
        part = _with_own(body, self._holder(name), {i: planes[n] for i, n in enumerate(outer) if n in planes})
        return self._reopened(part, outer, examples, branch.output, 1, planes)

    def _holder(self, name: str) -> nn.Module:
        return self.traced.graph_module.get_submodule(name.partition("@")[0])

    def _reopened(
        self,
        part: fx.GraphModule,
        outer: list[fx.Node],
        examples: list[Tensor],
        replaced: fx.Node,
        seq_dim: int,
        planes: Mapping[fx.Node, Plane],
    ) -> Reopened:
        """Trace and analyse ``part``, a graph that takes the stream and its side inputs."""
        sequence = examples[0].shape[seq_dim]
        try:
            graph_module = export_program(part, tuple(examples), {}).module(check_guards=False)
            normalise(graph_module.graph)
        except TraceError as e:
            raise Refusal(f"its sequence is fixed to {sequence} and it cannot be traced alone: {e}") from e
        graph = graph_module.graph
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        output: Any = next(n for n in graph.nodes if n.op == "output").args[0]
        output = output[0] if isinstance(output, tuple | list) else output
        shape = shape_of(value_of(placeholders[0]))
        sizes = Sizes(shape[1 - seq_dim], shape[seq_dim])
        inner = [n for n in graph.nodes if n.op == "call_function"]
        stands_for = dict(zip(placeholders, outer, strict=True))
        others = [p for p, n in stands_for.items() if n in planes and p is not placeholders[0]]
        found = analyse_part(inner, placeholders[0], output, sizes, seq_dim, others)
        if found.fixed:
            raise Refusal(f"its sequence stays fixed to {found.sizes.sequence} when it is traced alone")
        own = {p: planes[n] for p, n in stands_for.items() if n in planes}
        return Reopened(graph_module, stands_for, output, found, replaced, own)

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


def _with_own(body: Body, block: nn.Module, planes: Mapping[int, Plane]) -> fx.GraphModule:
    """A body that reads the block's own parameters from it, in place of taking them.

    planes: where the body has the tokens of its input at a place in two dims, of which the result has one.
    """
    old, graph = body.graph_module.graph, fx.Graph()
    placeholders = [n for n in old.nodes if n.op == "placeholder"]
    env = {n: graph.placeholder(n.name) for n in placeholders[: 1 + len(body.sides)]}
    for i, plane in planes.items():
        env[placeholders[i]] = plane.column(graph, env[placeholders[i]])
    taken = placeholders[1 + len(body.sides) :]
    env |= {n: graph.get_attr(path) for n, path in zip(taken, body.owned, strict=True)}
    output: Any = graph.graph_copy(old, env)
    graph.output(planes[0].flat(graph, output) if planes else output)
    return fx.GraphModule(block, graph)


def _example(node: fx.Node) -> Tensor:
    """A tensor of the size that a node's value had in the example inputs."""
    value = value_of(node)
    if not isinstance(value, Tensor):
        raise Refusal(
            f"it works with the size {expr_of(value)}, which is neither its batch nor its sequence ({node.name})"
        )
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
