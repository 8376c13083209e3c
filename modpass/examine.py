"""Which found blocks are checked by values, and where the values come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from modpass.check import check_block, needed_values
from modpass.record import Recorder
from modpass.sizes import Refusal
from modpass.symbols import value_of

if TYPE_CHECKING:
    from modpass.blocks import Block
    from modpass.reopen import Reopened, Reopener
    from modpass.tracing import Traced

__all__ = ["Examiner"]


class Examiner:
    """Checks blocks of one traced model on its example inputs, which run once for all of them."""

    def __init__(self, traced: Traced, reopener: Reopener, blocks: list[Block], check: bool | None) -> None:
        self.traced, self.reopener, self.check = traced, reopener, check
        self.picked = [b for b in blocks if check or b.analysis.unknown]
        self.values: dict[fx.Node, Any] | None = None

    def examine(self, block: Block) -> None:
        """Check one of the blocks.

        Raises:
            Refusal: its tokens meet outside attention, or it cannot be told.
        """
        if not any(b is block for b in self.picked):
            return
        unknown = [f"{n.target} is not known to keep tokens apart (node {n.name})" for n in block.analysis.unknown]
        why = unknown[0] if unknown else ""
        if self.check is False:
            raise Refusal(why)
        try:
            check_block(block.name, block.analysis, self._values(block))
        except Refusal as e:
            raise Refusal(f"{why}: {e}" if why else str(e)) from e

    def _values(self, block: Block) -> dict[fx.Node, Any]:
        if block.reopened is not None:
            recorder = Recorder(block.reopened.graph_module, needed_values(block.analysis))
            return recorder.record(*self._inputs(block, block.reopened))
        return self._whole()

    def _inputs(self, block: Block, reopened: Reopened) -> list[Any]:
        if block.branch is None:
            return self.reopener.inputs(block.name)
        return reopened.given(self._whole())

    def _whole(self) -> dict[fx.Node, Any]:
        if self.values is None:
            self.values = self._run()
        return self.values

    def _run(self) -> dict[fx.Node, Any]:
        graph_module = self.traced.graph_module
        given = pytree.tree_leaves(list(self.traced.examples.values()))
        inputs = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
        for node, value in zip(inputs, given, strict=True):
            if isinstance(value_of(node), Tensor) and (not isinstance(value, Tensor) or isinstance(value, FakeTensor)):
                raise Refusal(
                    f"it cannot be checked: the trace has no example value of the input '{node.target}'; export with "
                    "real example inputs, or give the nn.Module"
                )
        keep = {n for b in self.picked if b.reopened is None for n in needed_values(b.analysis)}
        keep |= {n for b in self.picked if b.branch and b.reopened for n in b.reopened.outer.values()}
        return Recorder(graph_module, keep).record(*given)
