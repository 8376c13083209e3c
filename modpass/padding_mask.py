"""Which input of a model says where padding is, for each stream that has it."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from modpass.analysis import Analysis
from modpass.blocks import Blocks
from modpass.errors import InputError
from modpass.symbols import expr_of, hint_of, value_of
from modpass.tracing import Traced

__all__ = ["PaddingMask"]


class PaddingMask:
    """The node that says which tokens are real, for a stream of given sizes."""

    def __init__(self, traced: Traced, name: str, found: Blocks) -> None:
        self.graph, self.inverted = traced.graph_module.graph, name.startswith("~")
        plain = name.removeprefix("~")
        named = [n for n in self.graph.nodes if n.op == "placeholder" and isinstance(value_of(n), Tensor)]
        self.nodes = [n for n in named if str(n.target) == plain or str(n.target).endswith(f"_{plain}")]
        self.nodes = [n for n in self.nodes if value_of(n).dim() == 2]
        tied = {b.analysis.sizes.sequence for b in found}
        self.loose = {n for n in self.nodes if expr_of(value_of(n).shape[1]) not in tied}
        if plain != "attention_mask" and not self.nodes:
            raise InputError(
                f"padding_mask '{plain}' is no traced input; there are: {', '.join(str(n.target) for n in named)}"
            )

    def of(self, analysis: Analysis) -> fx.Node | None:
        """The mask of a stream with these sizes, nonzero where a token is real."""
        node = next((n for n in self.nodes if self._fits(n, analysis)), None)
        if node is not None and value_of(node).is_floating_point():
            raise InputError(
                f"padding_mask '{node.target}' is a {value_of(node).dtype} tensor, which may be additive; "
                "give a bool or integer mask that is nonzero at real tokens"
            )
        if node is None or not self.inverted:
            return node
        with self.graph.inserting_before(next(u for u in self.graph.nodes if u.op not in ("placeholder", "get_attr"))):
            return self.graph.call_function(torch.ops.aten.logical_not.default, (node,))

    def _fits(self, node: fx.Node, analysis: Analysis) -> bool:
        """Same sizes as the stream; in the example, where the model itself never brings the two together."""
        length = value_of(node).shape[1]
        if node not in self.loose:
            return bool(expr_of(length) == analysis.sizes.sequence)
        return hint_of(length) == hint_of(value_of(analysis.stream).shape[analysis.seq_dim])
