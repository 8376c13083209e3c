"""``decode_step``: the graph of one token a row over caches, derived from the plain forward."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from modpass.analysis import is_uniform
from modpass.causal import dependent
from modpass.decode.block import Skipping, StepBlock
from modpass.decode.caches import named
from modpass.decode.causality import check_causal, check_length
from modpass.decode.copy import StepCopy
from modpass.decode.model import Cache, Routing, State, StepInfo, StepModel, TensorInput
from modpass.decode.names import free_placeholder, free_stem
from modpass.decode.outer import Outer, open_model, whole_numbers
from modpass.decode.rows import Rows
from modpass.decode.worlds import FullLength
from modpass.errors import BlockError, InputError
from modpass.functional import Gather
from modpass.gathers import gather_of
from modpass.routing import RoutedBlock
from modpass.sizes import Refusal
from modpass.symbols import shape_of, value_of

__all__ = ["decode_step"]


def decode_step(
    model: nn.Module | ExportedProgram,
    *,
    batch: int,
    max_sequence: int,
    skipping: Skipping = "masked",
    padding: bool = True,
    dims: Mapping[str, int] | None = None,
) -> StepModel:
    """Derive the decode step of a model: one token a row, attention over caches, routed blocks skipped.

    Args:
        model: dense, or routed with ``selection="causal"``.
        batch: rows B, a fixed number; where a model takes n rows of tokens for each, such as codebooks, its input
            has n*B, and ``position`` B.
        max_sequence: tokens that the caches hold; a routed block's cache holds its capacity of them.
        skipping: what a routed block does for a row that passes it by: "masked" computes and drops the result
            (exact per row, no control flow), "conditional" runs nothing when no row takes part (meant for one
            row), "batch_capacity" computes the capacity's share of the rows, those with the best scores among the
            rows that the input ``live`` ``[B]`` holds true for.
        padding: keep masks such as ``attention_mask`` as inputs ``[B, max_sequence]``; without, every token is real.
        dims: other free sizes by name.

    Returns:
        A graph module; ``inputs`` and ``outputs`` name what it takes and returns: the tokens ``[B, 1]``,
        ``position`` ``[B]`` (where the token stands in its row), caches and routing state; the model's outputs for
        that token, the new cache rows, and the new routing state. ``state()`` allocates, ``advance()`` steps.

    Raises:
        BlockError: tokens mix outside causal attention; names the operator.
        InputError: an argument is not what is allowed.

    >>> from modpass.decode.example import tiny_decoder
    >>> decode_step(tiny_decoder(), batch=1, max_sequence=8).caches[0].shape
    (1, 2, 8, 4)
    """
    if skipping not in get_args(Skipping):
        raise InputError(f"skipping is {skipping!r}; it must be one of {', '.join(map(repr, get_args(Skipping)))}")
    whole_numbers(batch=batch, max_sequence=max_sequence)
    outer = open_model(model, batch, dims)
    check_length(outer, max_sequence)
    check_causal(outer)
    try:
        return _Step(outer, max_sequence, skipping, padding).model()
    except Refusal as e:
        raise BlockError(f"this model cannot be decoded: {e}") from e


class _Step(StepCopy):
    """The copy of the whole model's graph for one token."""

    def __init__(self, outer: Outer, max_sequence: int, skipping: str, padding: bool) -> None:
        tokens = dependent(outer.graph, *outer.tokens)
        graph = fx.Graph()
        super().__init__(graph, tokens, outer.sizes, outer.known, max_sequence, self._side, outer.memory)
        self.outer, self.skipping, self.max_sequence = outer, skipping, max_sequence
        self.inner |= set(outer.tokens)
        self.full = FullLength(graph, outer.model, outer.sizes, max_sequence, outer.known)
        self.stem = free_stem(outer.model, "step")
        self.inputs: list[tuple[str, fx.Node]] = []
        for node in outer.tokens:
            self.step[node] = self._input(str(node.target), node)
        self.position = self.slot = self._placeholder("position")
        routes = any(n.op == "call_module" for n in tokens)
        chooses = skipping == "batch_capacity" and routes  # the other ways, no row stands in another's way
        self.live = self._placeholder("live") if chooses else None
        for node in outer.graph.nodes:
            if node.op == "placeholder" and node not in outer.tokens:
                self._whole_input(node, padding)
        self.declare()
        self.states = self._name_memory()
        self.blocks = {n: self._block(n) for n in tokens if n.op == "call_module"}
        self.results: dict[fx.Node, fx.Node] = {}
        index = graph.call_function(torch.unsqueeze, (self.position, 1))
        self.rows = Rows(self.full, index)
        self.run(call_module=self._routed)

    # Inputs

    def _placeholder(self, name: str) -> fx.Node:
        node = free_placeholder(self.graph, name)
        self.inputs.append((name, node))
        return node

    def _input(self, name: str, node: fx.Node) -> fx.Node:
        placed = self._placeholder(name)
        placed.meta["shape"] = self._shape(node, 1)
        placed.meta["dtype"] = value_of(node).dtype
        return placed

    def _shape(self, node: fx.Node, sequence: int) -> tuple[int, ...]:
        sizes = [self.sizes.canonical(s).subs(self.known) for s in shape_of(value_of(node))]
        return tuple(int(s.subs({self.sizes.canonical(self.sizes.sequence): sequence})) for s in sizes)

    def _whole_input(self, node: fx.Node, padding: bool) -> None:
        """A mask at full length: an input, or all ones where no row is padded."""
        name = str(node.target)
        if not padding and name in self.outer.model.info.call.optional:
            ones = torch.ones(self._shape(node, self.max_sequence), dtype=value_of(node).dtype)
            self.full.constants[node] = ones
            self.full.copies[node] = self.graph.get_attr(self.full.name_table(ones))
            return
        placed = self._placeholder(name)
        placed.meta["shape"], placed.meta["dtype"] = self._shape(node, self.max_sequence), value_of(node).dtype
        self.full.copies[node], self.full.constants[node] = placed, None

    def _name_memory(self) -> list[State]:
        """Names for caches and for what else is remembered, which becomes inputs under them."""
        parts = list(self.remembered)
        names = named([*((c.node, c.kind) for c in self.caches), *((p.node, p.kind) for p in parts)], self.outer.model)
        for cache, name in zip(self.caches, names, strict=False):
            cache.name = name
            self.inputs.append((name, cache.place))
        states = []
        for part, name in zip(parts, names[len(self.caches) :], strict=True):
            self.inputs.append((name, self.remembered[part]))
            shape = [part.count if d == part.dim else size for d, size in enumerate(self._shape(part.node, 1))]
            states.append(State(name, tuple(shape), value_of(part.node).dtype))
        return states

    def _block(self, node: fx.Node) -> tuple[StepBlock, list[fx.Node]]:
        block: Any = self.outer.model.get_submodule(str(node.target))
        if not isinstance(block, RoutedBlock):
            raise Refusal(f"the submodule '{node.target}' is no routed block")
        slots = block.slots(self.max_sequence)
        step = StepBlock(block, self.outer.rows, slots, self.known, self.skipping)
        names = [f"{block.name}.count", f"{block.name}.places"]
        names += [f"{block.name}.cache_{i}" for i in range(len(step.caches))]
        return step, [self._placeholder(n) for n in names]

    # Nodes

    def _side(self, consumer: fx.Node, node: fx.Node) -> Any:
        if is_uniform(node) and (value := self.full.constant(node)) is not None:
            return self._uniform(consumer, node, value)
        gather = gather_of(consumer, node, self.sizes)
        if gather is None:
            return self.full(node)
        keyed = self.sees_keys(consumer)
        return self._at_position(node, gather, keyed)

    def _uniform(self, consumer: fx.Node, node: fx.Node, value: Tensor) -> fx.Node:
        """A tensor with one value in every place, at the sizes of a step."""
        keyed = self.sees_keys(consumer)
        for dim, size in enumerate(self._shape(node, 1)):
            if not (keyed and dim == value.dim() - 1):
                value = value.narrow(dim, 0, size)
        return self.graph.get_attr(self.full.name_table(value))

    def _at_position(self, node: fx.Node, gather: Gather, keyed: bool) -> Any:
        dims = tuple(d for d in gather.dims if not (keyed and d == gather.rank - 1))
        if not dims:
            return self.full(node)
        return self.rows(node, replace(gather, dims=dims))

    def _routed(self, node: fx.Node) -> fx.Node:
        step, state = self.blocks[node]
        stream, keep, *sides = node.args
        kept = None
        if keep is not None:
            kept = self.rows(keep, Gather(2, 0, True, (1,)))  # type: ignore[arg-type]
        kept = self._only_live(kept)
        given = [self._routed_side(s, g) for s, g in zip(sides, step.queries, strict=True)]
        count, places, *caches = state
        arguments = (self.step[stream], kept, self.position, count, places, *caches, *given)  # type: ignore[index]
        call = self.graph.call_module(self._step_name(node), arguments)
        self.results[node] = call
        return self.graph.call_function(operator.getitem, (call, 0))

    def _only_live(self, kept_B1: Any) -> Any:
        """A row that is not live is no more chosen than padding is."""
        if self.live is None:
            return kept_B1
        live_B1 = self.graph.call_function(torch.unsqueeze, (self.live, 1))
        if kept_B1 is None:
            return live_B1
        real_B1 = self.graph.call_function(torch.ne, (kept_B1, 0))
        return self.graph.call_function(torch.logical_and, (real_B1, live_B1))

    def _step_name(self, node: fx.Node) -> str:
        return f"{self.stem}_{list(self.blocks).index(node)}"

    def _routed_side(self, side: Any, gather: Gather | None) -> Any:
        if side in self.step:
            return self.step[side]
        return self.full(side) if gather is None else self.rows(side, gather)

    # The result

    def model(self) -> StepModel:
        output = next(n for n in self.outer.graph.nodes if n.op == "output")
        leaves = [n for n in pytree.tree_leaves(output.args) if isinstance(n, fx.Node)]
        results: list[Any] = [self.step[n] if n in self.step else self.full(n) for n in leaves]
        caches = [Cache(c.name, c.shape, c.dtype, c.dim) for c in self.caches]
        results += [*self.new_rows(), *(self.left[part] for part in self.remembered)]
        routing = []
        for node, (step, _) in self.blocks.items():
            name = step.name
            own = [Cache(f"{name}.cache_{i}", c.shape, c.dtype, c.dim, name) for i, c in enumerate(step.caches)]
            routing.append(Routing(name, step.slots, tuple(own)))
            results += [
                self.graph.call_function(operator.getitem, (self.results[node], i + 1)) for i in range(1 + len(own))
            ]
        self.graph.output(tuple(results))
        given = ((name, node.meta) for name, node in self.inputs if "shape" in node.meta)
        inputs = tuple(TensorInput(name, meta["shape"], meta["dtype"]) for name, meta in given)
        names = tuple(self.outer.model.output_names[: len(leaves)])
        info = StepInfo(
            self.outer.rows, self.max_sequence, inputs, tuple(caches), tuple(self.states), tuple(routing), names
        )
        modules = {self._step_name(n): step for n, (step, _) in self.blocks.items()}
        made = StepModel.build(self.outer.model, self.graph, info, self.full.tables, modules)
        made.meta["modpass.inputs"] = tuple(name for name, _ in self.inputs)
        return made
