"""Counted operations and bytes of each operator of a graph: what a roofline is drawn from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from modpass import RoutedModel
from modpass.bench.flops import paths_of
from modpass.training.cost import flop_counter

__all__ = ["Cost", "costs"]

# They move tokens or rows about and cannot be fused away; everything else without operations is taken as fused.
_MOVES = ("index", "index_put", "_index_put_impl", "gather", "scatter", "cat", "embedding", "sort", "topk")


@dataclass(frozen=True)
class Cost:
    """One operator: floating-point operations, bytes of its operands and results, and the block that it is of."""

    operator: str
    flops: int
    bytes: int
    block: str = ""


def costs(graph: fx.GraphModule, inputs: Sequence[Any] | Mapping[str, Any], blocks: Collection[str] = ()) -> list[Cost]:
    """The operators of one run that compute or move something. Nothing is computed: the tensors are fake.

    Products, convolutions and attention have operations, and read and write every operand once. Gathers, scatters
    and concatenations move their result twice. Elementwise operators and norms are taken as fused into those.

    Args:
        graph: a traced model, or a step of one.
        inputs: for a traced model its inputs by name; else the values of the placeholders in order.
        blocks: names of modules to book operators on.

    >>> from modpass import trace
    >>> costs(trace(torch.nn.Linear(3, 5), torch.ones(2, 3)), {"input": torch.ones(2, 3)})
    [Cost(operator='addmm', flops=60, bytes=144, block='')]
    """
    counter = flop_counter()
    recorder = _Recorder(counter)
    run = _ByBlock(graph, recorder, blocks)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fake, counter, recorder:
        given = pytree.tree_map_only(Tensor, fake.from_tensor, inputs)
        run.run(*(graph.info.call.bind(given) if isinstance(graph, RoutedModel) else given))
    for module in graph.modules():
        if hasattr(module, "last"):
            module.last = None  # type: ignore[assignment]  # a routed block's, made of fake tensors
    return recorder.found


class _Recorder(TorchDispatchMode):
    """Notes each operator that computes or moves something."""

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counter, self.block = counter, ""
        self.found: list[Cost] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = self.counter.get_total_flops()
        result = func(*args, **(kwargs or {}))
        flops = self.counter.get_total_flops() - before
        name = func.overloadpacket.__name__
        written = _bytes(result)
        if flops:
            self.found.append(Cost(name, flops, _bytes((args, kwargs)) + written, self.block))
        elif name in _MOVES:
            self.found.append(Cost(name, 0, 2 * written, self.block))
        return result


class _ByBlock(fx.Interpreter):
    """Runs a graph and tells the recorder which block each node is of."""

    def __init__(self, graph: fx.GraphModule, recorder: _Recorder, blocks: Collection[str]) -> None:
        super().__init__(graph)
        self.recorder, self.blocks = recorder, frozenset(blocks)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        self.recorder.block = next(iter(paths_of(n) & self.blocks), "")
        return super().run_node(n)


def _bytes(values: Any) -> int:
    """Bytes of every tensor, each of them once."""
    tensors = {id(t): t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)}
    return sum(t.numel() * t.element_size() for t in tensors.values())
