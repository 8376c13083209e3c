"""Counted floating-point operations: what a speed-up could be at best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from modpass import RoutedModel, recorded_choices
from modpass.training.cost import flop_counter

__all__ = ["FlopCount", "count_flops", "paths_of"]


@dataclass(frozen=True)
class FlopCount:
    """Operations of one call, in all and by named block; ``slots``: the tokens that a routed block takes."""

    total: int
    blocks: Mapping[str, int] = field(default_factory=dict)
    slots: Mapping[str, int] = field(default_factory=dict)


def count_flops(model: RoutedModel, inputs: Mapping[str, Tensor], blocks: Collection[str] = ()) -> FlopCount:
    """Count the operations of matrix products, convolutions and attention; a multiply-add counts as two.

    Nothing is computed: the tensors are fake. Masked pairs of tokens count, as kernels compute them.
    Source: ``torch.utils.flop_counter``.

    >>> from modpass import trace
    >>> count_flops(trace(torch.nn.Linear(3, 5), torch.ones(2, 3)), {"input": torch.ones(2, 3)}).total
    60
    """
    counter = flop_counter()
    by_block = _ByBlock(model, counter, blocks)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fake, counter:
        given = {name: fake.from_tensor(tensor) for name, tensor in inputs.items()}
        with recorded_choices() as choices:
            by_block.run(*model.info.call.bind(given))
    for block in model.routed_blocks.values():
        block.last = None  # made of fake tensors
    slots = {name: int(index_Bk.shape[1]) for name, index_Bk in choices.items()}
    return FlopCount(counter.get_total_flops(), dict(by_block.counts), slots)


def paths_of(node: fx.Node) -> set[str]:
    """The modules that a node of a traced model is of.

    A routed block is one node with the block's name; a dense one is many, with it in their stacks.

    >>> paths_of(fx.Graph().placeholder("x"))
    {'x'}
    """
    return {str(node.target), *(path for path, _ in (node.meta.get("nn_module_stack") or {}).values())}


class _ByBlock(fx.Interpreter):
    """Runs a graph and books what each node adds to ``counter`` on the block that the node is of."""

    def __init__(self, model: RoutedModel, counter: FlopCounterMode, blocks: Collection[str]) -> None:
        super().__init__(model)
        self.counter, self.names = counter, frozenset(blocks)
        self.counts: Counter[str] = Counter()

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        before = self.counter.get_total_flops()
        result = super().run_node(n)
        for name in paths_of(n) & self.names:
            self.counts[name] += self.counter.get_total_flops() - before
        return result
