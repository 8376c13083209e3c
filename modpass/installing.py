"""Picked blocks -> routed blocks in their places: all bodies are copied out before the first call is put in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx, nn

from modpass.analysis import Analysis
from modpass.blocks import Block
from modpass.dropout import switch_dropout
from modpass.padding_mask import PaddingMask
from modpass.parts import Parts, cut_out, find_cut
from modpass.planes import Plane
from modpass.rewrite import Body, outline, replace_call, splice
from modpass.routing import RoutedBlock
from modpass.symbols import value_of

__all__ = ["Plan", "install_blocks", "routed_block"]


@dataclass(frozen=True)
class Plan:
    """One block ready to be replaced."""

    name: str
    analysis: Analysis
    body: Body
    plane: Plane | None = None


def install_blocks(
    graph_module: fx.GraphModule,
    blocks: list[Block],
    parts: Parts,
    make: Callable[[Plan], RoutedBlock],
    mask: PaddingMask,
) -> None:
    """Replace each block by the routed block that ``make`` makes of its plan."""
    moved: dict[fx.Node, fx.Node] = {}
    plans = [_plan(graph_module, block, parts, moved) for block in blocks]
    for plan in plans:
        analysis = plan.analysis
        # what an input says of words is not said of places
        real = mask.of(analysis) if plan.plane is None else None
        outer = [analysis.stream, real, *(s.node for s in plan.body.sides)]
        arguments = tuple(None if n is None else moved.get(n, n) for n in outer)
        _install(graph_module, plan.name, make(plan))
        moved[analysis.output] = replace_call(graph_module.graph, plan.name, analysis, arguments)


def _plan(graph_module: fx.GraphModule, block: Block, parts: Parts, moved: dict[fx.Node, fx.Node]) -> Plan:
    analysis = block.analysis
    if parts != "block" and block.branch is None:
        analysis = cut_out(analysis, find_cut(analysis, parts))
    if block.reopened is not None:
        old = block.replaced
        env, moved[old] = splice(graph_module, block.name, old, block.reopened, moved)
        analysis = _translate(analysis, env)
    plane = None if block.reopened is None else block.reopened.plane
    return Plan(block.name, analysis, outline(block.name, analysis), plane)


def _translate(analysis: Analysis, env: Mapping[fx.Node, fx.Node]) -> Analysis:
    """The analysis of a reopened block, said of its copy in the whole model's graph."""
    gathers = {(env[n], env[s]): g for (n, s), g in analysis.gathers.items()}
    return Analysis(
        env[analysis.stream],
        env[analysis.output],
        analysis.sizes,
        analysis.seq_dim,
        analysis.width,
        [env[n] for n in analysis.tokens],
        [env[n] for n in analysis.hoisted],
        gathers,
    )


def routed_block(plan: Plan, capacity: float, gate: str, selection: str, predictor: bool) -> RoutedBlock:
    """The routed block of a plan; its parameters stay where they are until it is installed."""
    analysis, body = plan.analysis, plan.body
    switch_dropout(body.graph_module)
    body.graph_module.recompile()
    routed = RoutedBlock(
        plan.name,
        body.graph_module,
        analysis.width,
        capacity=capacity,
        gate=gate,
        selection=selection,
        gathers=[s.gather for s in body.sides],
        owned=body.owned,
        seq_dim=analysis.seq_dim if analysis.order is None else 1,
        predictor=predictor,
        device=value_of(analysis.stream).device,
    )
    routed.order = analysis.order
    if plan.plane is not None:
        routed.order, routed.token_dims = plan.plane.order, 2
    return routed


def _install(graph_module: fx.GraphModule, name: str, routed: RoutedBlock) -> None:
    parent_path, _, leaf = name.rpartition(".")
    parent: nn.Module = graph_module
    for part in filter(None, parent_path.split(".")):
        if part not in parent._modules:
            parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    if leaf in parent._modules:
        routed.adopt(parent.get_submodule(leaf))
    parent._modules[leaf] = routed
