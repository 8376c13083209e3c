"""A block whose sequence the trace fixed to a number is traced once more, alone, with its stream free.

A vision transformer's 257 tokens follow from its image size, so the whole model's graph holds the number itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from modpass.analysis import Analysis, Refusal, analyse
from modpass.errors import TraceError
from modpass.mixing import name_of
from modpass.rewrite import normalise
from modpass.symbols import value_of
from modpass.tracing import Traced, export_program

__all__ = ["Reopened", "Reopener"]


@dataclass(frozen=True)
class Reopened:
    """A block's own graph, and which node of the whole model's graph each of its placeholders stands for."""

    graph_module: fx.GraphModule = field(repr=False)
    outer: dict[fx.Node, fx.Node] = field(repr=False)
    output: fx.Node = field(repr=False)
    analysis: Analysis = field(repr=False)


class Reopener:
    """Traces single blocks of one traced model, from the inputs they get in a run on its example inputs."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced

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
        args, kwargs = self._calls[name]
        try:
            graph_module = export_program(block, args, kwargs).module(check_guards=False)
            normalise(graph_module.graph)
        except TraceError as e:
            raise Refusal(f"its sequence is fixed to {fixed.sizes.sequence} and it cannot be traced alone: {e}") from e
        outer = self._outer(graph_module, nodes, (args, kwargs))
        inner = [n for n in graph_module.graph.nodes if n.op == "call_function"]
        found = analyse(inner)
        if found.fixed:
            raise Refusal(f"its sequence stays fixed to {found.sizes.sequence} when it is traced alone")
        return Reopened(graph_module, outer, found.output, found)

    def _outer(self, graph_module: fx.GraphModule, nodes: list[fx.Node], given: Any) -> dict[fx.Node, fx.Node]:
        """Match the block's inputs with nodes of the whole graph by their values on the example inputs."""
        inside = set(nodes)
        sources = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside)
        placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
        matched: dict[fx.Node, fx.Node] = {}
        for placeholder, value in zip(placeholders, pytree.tree_leaves(given), strict=True):
            if not placeholder.users:
                continue
            source = next((s for s in sources if s in self._values and _same(self._values[s], value)), None)
            if source is None:
                raise Refusal(f"its input '{placeholder.name}' is not found in the whole model's graph")
            matched[placeholder] = source
        return matched

    @cached_property
    def _calls(self) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments of every module call in one run, under the names that torch.export gives repeated calls."""
        module = self.traced.module
        calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        counts: dict[str, int] = {}
        assert module is not None

        def hook(name: str) -> Any:
            def record(_: nn.Module, args: Any, kwargs: Any) -> None:
                count = counts[name] = counts.get(name, -1) + 1
                calls[f"{name}@{count}" if count else name] = (args, kwargs)

            return record

        handles = [m.register_forward_pre_hook(hook(n), with_kwargs=True) for n, m in module.named_modules() if n]
        try:
            with torch.no_grad():
                module(**self.traced.examples)
        finally:
            for handle in handles:
                handle.remove()
        return calls

    @cached_property
    def _values(self) -> dict[fx.Node, Any]:
        recorder = _Recorder(self.traced.graph_module)
        with torch.no_grad():
            recorder.run(*pytree.tree_leaves(list(self.traced.examples.values())), enable_io_processing=False)
        return recorder.values


class _Recorder(fx.Interpreter):
    """Runs a graph without dropout and keeps every tensor."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        # The trace may be one of training, but the calls were recorded without dropout.
        dropped = name_of(n) == "dropout"
        result = self.fetch_args_kwargs_from_env(n)[0][0] if dropped else super().run_node(n)
        if isinstance(result, Tensor) and isinstance(value_of(n), Tensor):
            self.values[n] = result
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.scaled_dot_product_attention.default:
            names = [a.name for a in target._schema.arguments]
            args, kwargs = (), {**dict(zip(names, args, strict=False)), **kwargs, "dropout_p": 0.0}
        return super().call_function(target, args, kwargs)


def _same(a: Any, b: Any) -> bool:
    return (
        isinstance(b, Tensor)
        and a.shape == b.shape
        and a.dtype == b.dtype
        and torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5, equal_nan=True)
    )
