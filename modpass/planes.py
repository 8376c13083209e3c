"""Tokens in two dims, as those of an image: ``[B, C, H, W]`` or ``[B, H, W, C]`` as a sequence of H * W."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from modpass.symbols import value_of

__all__ = ["Plane"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Plane:
    """Where a tensor of four dims, the first of which is the batch, has its two dims of tokens."""

    places: tuple[int, int]

    @property
    def order(self) -> tuple[int, int, int, int]:
        """The permutation that puts batch and tokens first and channels last."""
        channel = next(i for i in (1, 2, 3) if i not in self.places)
        return (0, *self.places, channel)

    def flat(self, graph: fx.Graph, x: fx.Node) -> fx.Node:
        """As a sequence ``[B, H * W, C]``, at the graph's insert point."""
        last = graph.call_function(aten.permute.default, (x, list(self.order)))
        return graph.call_function(aten.flatten.using_ints, (last, 1, 2))

    def laid_out_like(self, graph: fx.Graph, x: fx.Node, like: fx.Node) -> fx.Node:
        """A sequence with its tokens in two dims, of the sizes that they have in ``like``."""
        sizes = [_size(graph, like, place) for place in self.places]
        return self._permuted_back(graph, graph.call_function(aten.unflatten.int, (x, 1, sizes)))

    def column(self, graph: fx.Graph, x: fx.Node) -> fx.Node:
        """A sequence with its S tokens in two dims, of the sizes S and 1."""
        return self._permuted_back(graph, graph.call_function(aten.unsqueeze.default, (x, 2)))

    def _permuted_back(self, graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_function(aten.permute.default, (x, [self.order.index(i) for i in range(4)]))

    def flat_value(self, x: Tensor) -> Tensor:
        """As ``flat``, of a tensor."""
        return x.permute(self.order).flatten(1, 2)


def _size(graph: fx.Graph, x: fx.Node, place: int) -> Any:
    size = value_of(x).shape[place]
    if isinstance(size, int):
        return size
    node = graph.call_function(aten.sym_size.int, (x, place))
    node.meta["val"] = size
    return node
