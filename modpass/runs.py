"""The model run on its example inputs: what each module call was given, and what the graph's nodes are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from modpass.record import Recorder, evaluated
from modpass.sizes import Refusal
from modpass.tracing import Traced

__all__ = ["Run", "Runs"]


class Runs:
    """The runs of one traced model, each made when it is first asked for."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced

    @cached_property
    def plain(self) -> Run:
        """The model as it is."""
        return self._run(self.traced.examples, {})

    @cached_property
    def jittered(self) -> Run:
        """Another run with noise on parameters and inputs: values that were equal by chance no longer are."""
        generator = torch.Generator().manual_seed(0)
        noisy: dict[Tensor, Tensor] = {}

        def jitter(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            if value not in noisy:  # a tied parameter stays tied
                noise = torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
                noisy[value] = value.detach() + 0.02 * noise
            return noisy[value]

        assert self.traced.module is not None
        parameters = {n: jitter(p) for n, p in self.traced.module.named_parameters(remove_duplicate=False)}
        try:
            return self._run(pytree.tree_map(jitter, self.traced.examples), parameters)
        except Exception as e:
            raise Refusal(
                "several of its inputs are equal on the example inputs, and the model does not run with noise on "
                f"its parameters: {e}"
            ) from e

    def _run(self, examples: dict[str, Any], parameters: dict[str, Tensor]) -> Run:
        assert self.traced.module is not None
        crossing = {n for n in self.traced.graph_module.graph.nodes if any(_stack(u) != _stack(n) for u in n.users)}
        recorder = Recorder(self.traced.graph_module, crossing, parameters)
        with _one_draw():
            values = recorder.record(*pytree.tree_leaves(list(examples.values())))
        with _one_draw():
            return Run(_calls(self.traced.module, examples, parameters), values)


@contextmanager
def _one_draw() -> Iterator[None]:
    """A model that draws noise of its own, such as the patches to hide, draws the same here each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@dataclass(frozen=True)
class Run:
    """One run: the arguments of each module call, and the values of the graph's nodes."""

    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]]
    values: dict[fx.Node, Any]

    def alike(self, sources: list[fx.Node], name: str, place: int) -> list[fx.Node]:
        """Those of ``sources`` that equal what the block ``name`` got at ``place``."""
        given = pytree.tree_leaves(self.calls[name])[place]
        return [s for s in sources if s in self.values and _same(self.values[s], given)]


def _calls(
    module: nn.Module, examples: dict[str, Any], parameters: dict[str, Tensor]
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of every module call in one run, under the names that torch.export gives repeated calls."""
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    counts: dict[str, int] = {}

    def hook(name: str) -> Any:
        def record(_: nn.Module, args: Any, kwargs: Any) -> None:
            count = counts[name] = counts.get(name, -1) + 1
            calls[f"{name}@{count}" if count else name] = (args, kwargs)

        return record

    handles = [m.register_forward_pre_hook(hook(n), with_kwargs=True) for n, m in module.named_modules() if n]
    try:
        with torch.no_grad(), evaluated(module):
            torch.func.functional_call(module, parameters, (), examples)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _stack(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.meta.get("nn_module_stack") or ())


def _same(a: Any, b: Any) -> bool:
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.shape == b.shape
        and a.dtype == b.dtype
        and torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5, equal_nan=True)
    )
