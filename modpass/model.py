"""The traced model: a graph module that is called like the original and knows its routed blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from modpass.blocks import Skipped
from modpass.calling import Call, CallCodeGen
from modpass.errors import PickleError
from modpass.rewrite import retarget
from modpass.routing import RoutedBlock

__all__ = ["InputSpec", "RoutedModel"]


@dataclass(frozen=True)
class InputSpec:
    """A tensor input of the graph: its name, and its dims as numbers or as names such as "batch" and "sequence"."""

    name: str
    dims: tuple[int | str, ...]
    dtype: torch.dtype
    example: Tensor | None = field(repr=False, compare=False, default=None)


@dataclass
class Info:
    """What a traced model knows of itself beside its graph; skipped: the candidates that cannot be routed, and why."""

    call: Call
    out_spec: pytree.TreeSpec
    inputs: tuple[InputSpec, ...]
    output_names: tuple[str, ...]
    settings: dict[str, Any]
    source: dict[str, Any]
    skipped: tuple[Skipped, ...] = ()


class RoutedModel(fx.GraphModule):
    """A traced model, dense or with routed blocks; call it like the original.

    Parameters are shared with the original by name and storage.
    """

    accepts_loss_kwargs = False  # says to Hugging Face's Trainer that a loss is a mean over its own batch

    def __init__(self, root: nn.Module | dict[str, Any], graph: fx.Graph, info: Info | str = "RoutedModel") -> None:
        if isinstance(info, Info):
            graph.set_codegen(CallCodeGen(info.call, info.out_spec))
        super().__init__(root, graph, "RoutedModel")
        if isinstance(info, Info):
            self.meta["modpass"] = info

    @property
    def info(self) -> Info:
        """How it is called, its inputs and outputs, and its settings."""
        found: Info = self.meta["modpass"]
        return found

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """The tensor inputs in order."""
        return self.info.inputs

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the tensor outputs in order."""
        return self.info.output_names

    @property
    def settings(self) -> dict[str, Any]:
        """The transform's settings, as plain JSON values."""
        return self.info.settings

    @property
    def routed_blocks(self) -> dict[str, RoutedBlock]:
        """The routed blocks by name, in the order in which they run."""
        calls = (n.target for n in self.graph.nodes if n.op == "call_module")
        blocks = ((str(t), self.get_submodule(str(t))) for t in calls)
        return {name: b for name, b in blocks if isinstance(b, RoutedBlock)}

    def seed(self, generator: torch.Generator | None) -> RoutedModel:
        """Draw the noise of ``selection="stochastic"`` from ``generator`` from now on."""
        for block in self.routed_blocks.values():
            block.generator = generator
        return self

    def use_causal(self, on: bool = True) -> RoutedModel:
        """Let routed blocks select causally in eval mode, as decode does; training mode keeps its own selection.

        For models whose attention is causal, once routers or predictors were trained to say by themselves which
        tokens top-k takes (``modpass.training.routing_losses``). ``save_pretrained`` keeps it.

        Raises:
            BlockError: a block's attention cannot be followed.
        """
        for block in self.routed_blocks.values():
            if on:
                block.ready_causal()
            block.eval_selection = "causal" if on else None
        return self

    def graphs(self) -> Iterator[fx.GraphModule]:
        """The model's own graph and that of each routed block's body."""
        yield self
        for block in self.routed_blocks.values():
            yield from (g for g in block.children() if isinstance(g, fx.GraphModule))

    def _apply(self, fn: Any, recurse: bool = True) -> RoutedModel:
        """Let the graph's own constants follow a move to another device."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = next((p.device for p in self.parameters()), None)
        for graph_module in self.graphs() if device is not None else ():
            retarget(graph_module, device)  # type: ignore[arg-type]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RoutedModel:
        """Copy parameters and graph; two copies share nothing but constants of the call."""
        return self._copied(memo, lambda members: copy.deepcopy(members, memo))

    def __copy__(self) -> RoutedModel:
        """Another module with the same parameters and submodules, and a graph of its own."""
        return self._copied({}, dict)

    def _copied(self, memo: dict[int, Any], members: Callable[[dict[str, Any]], dict[str, Any]]) -> RoutedModel:
        fresh = RoutedModel({}, fx.Graph(), self.info)
        memo[id(self)] = fresh
        for slot in ("_parameters", "_buffers", "_modules"):
            object.__setattr__(fresh, slot, members(getattr(self, slot)))
        fresh._non_persistent_buffers_set = set(self._non_persistent_buffers_set)
        fresh.training = self.training
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        graph.set_codegen(CallCodeGen(self.info.call, self.info.out_spec))
        fresh.graph = graph
        fresh.meta = dict(self.meta)
        return fresh

    def __reduce__(self) -> NoReturn:
        """Say what to save instead: a pickled graph is code, which nobody should have to load."""
        raise PickleError(
            "a traced model is not pickled, as its graph is code; save its weights by "
            "torch.save(model.state_dict(), path), or the model that it can be made from again by "
            "modpass.save_pretrained(model, folder)"
        )
