"""A routed model with any of its blocks routed, dropped or dense, and what changing one more does to its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import takewhile
from typing import Any

from torch import Tensor, nn

from modpass.routing import RoutedBlock
from modpass.training.distill import dense_mode
from modpass.training.losses import routed_blocks
from modpass.training.measure import answering, change_of, give, pass_by, recorded
from modpass.training.stream import Loss, call

__all__ = ["Together", "at_capacities"]

Answers = dict[RoutedBlock, Callable[..., Tensor]]


@contextmanager
def at_capacities(model: nn.Module, capacities: Mapping[str, float]) -> Iterator[Answers]:
    """Inside, these blocks have these capacities and all others are dense; yields what answers for those of 0."""
    blocks = routed_blocks(model)
    routed = {n: c for n, c in capacities.items() if c > 0}
    with ExitStack() as stack:
        stack.enter_context(dense_mode(model, but=list(routed)))
        for name, capacity in routed.items():
            stack.callback(setattr, blocks[name], "capacity", blocks[name].capacity)
            blocks[name].capacity = capacity
        yield {blocks[n]: pass_by for n, c in capacities.items() if c == 0}


class Together:
    """capacities: of the blocks that are not dense (0: dropped); dense, loss: of the dense model, and with these."""

    def __init__(self, model: nn.Module, batches: list[Any], loss: Loss | None) -> None:
        self.model, self.batches, self.given_loss = model, batches, loss
        self.capacities: dict[str, float] = {}
        self.outputs: list[dict[RoutedBlock, Tensor]] = []
        self.wanted: list[Any] = []
        self.loss = self.dense = self._record()

    def set(self, name: str, capacity: float) -> None:
        """Keep a change."""
        self.capacities[name] = capacity
        self.loss = self._record()

    def rise(self, name: str, capacity: float) -> float:
        """What the loss would rise by; blocks that run before this one give what they gave, which saves half."""
        total = 0.0
        with at_capacities(self.model, {**self.capacities, name: capacity}) as dropped:
            for i, batch in enumerate(self.batches):
                with answering({**dropped, **self._before(name, self.outputs[i])}):
                    total += self._loss(i, call(self.model, batch))
        return total / len(self.batches) - self.loss

    def _before(self, name: str, outputs: dict[RoutedBlock, Tensor]) -> Answers:
        earlier = takewhile(lambda item: item[0].name != name, outputs.items())  # in the order in which they run
        return {block: partial(give, output) for block, output in earlier}

    def _record(self) -> float:
        """Run the model as it is set; keep what every block gives."""
        outputs, total = [], 0.0
        with at_capacities(self.model, self.capacities) as dropped, answering(dropped):
            for i, batch in enumerate(self.batches):
                with recorded(self.model) as found:
                    output = call(self.model, batch)
                outputs.append(dict(found))
                total += self._loss(i, output)
        self.outputs = outputs
        return total / len(self.batches)

    def _loss(self, i: int, output: Any) -> float:
        if self.given_loss is not None:
            return float(self.given_loss(output, self.batches[i]))
        if len(self.wanted) == i:  # the first run is the dense model's
            self.wanted.append(output)
        return change_of(output, self.wanted[i])
