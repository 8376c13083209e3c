"""The part of a side input that one token sees: its row at the token's position, made without the whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from modpass.decode.worlds import FullLength, is_size
from modpass.functional import Gather, take
from modpass.mixing import is_pointwise, name_of
from modpass.symbols import shape_of, value_of

__all__ = ["Rows", "take_row"]

_KEEPS = {"to", "_to_copy", "clone", "contiguous", "alias", "detach", "type_as"}


def take_row(
    side: Tensor, index_B1: Tensor, rank: int, batch: int, batched: bool, dims: tuple[int, ...], repeat: int
) -> Tensor:
    """``take`` with the fields of its ``Gather`` given one by one, as generated code can write them.

    >>> import torch
    >>> take_row(torch.arange(6.0).view(3, 2), torch.tensor([[2]]), 3, 0, False, (1,), 1).tolist()
    [[[4.0, 5.0]]]
    """
    return take(side, index_B1, Gather(rank, batch, batched, dims, repeat))


class Rows:
    """Rows of full-length values at ``index_B1``, in the frame of what they broadcast to.

    A mask ``[S, S]`` is not made whole for the sake of one row: the position is taken before the two dims meet.
    """

    def __init__(self, full: FullLength, index_B1: fx.Node) -> None:
        self.full, self.index = full, index_B1
        self.made: dict[Any, Any] = {}

    def __call__(self, node: fx.Node, gather: Gather) -> Any:
        """``node`` with its dims ``gather.dims``, which count queries, reduced to the token's own."""
        key = node, gather.rank, gather.batch, gather.dims, gather.repeat
        if key not in self.made:
            self.made[key] = self._row(node, gather)
        return self.made[key]

    def _row(self, node: fx.Node, gather: Gather) -> Any:
        if is_size(node):
            return self.full(node)
        shape = shape_of(value_of(node))
        offset = gather.rank - len(shape)
        carried = [i + offset for i, size in enumerate(shape) if self.full.sizes.carries(size)]
        dims = tuple(d for d in gather.dims if d in carried)
        if not dims:
            return self.full(node)
        if len(carried) > len(dims) and (inner := self._sunk(node, gather)) is not None:
            return inner
        batched = gather.batch >= offset and shape[gather.batch - offset] != 1
        plain = (gather.rank, gather.batch, bool(batched), dims, gather.repeat)
        return self.full.graph.call_function(take_row, (self.full(node), self.index, *plain))

    def _sunk(self, node: fx.Node, gather: Gather) -> Any:
        """The operator on the rows of its inputs, where it works place by place."""
        if name_of(node) == "expand":
            return self(node.args[0], gather)  # type: ignore[arg-type]
        if name_of(node) == "unsqueeze" and self._leads(node):
            return self(node.args[0], gather)  # type: ignore[arg-type]
        if not (is_pointwise(node) or name_of(node) in _KEEPS) or node.op != "call_function":
            return None
        value = lambda a: self(a, gather) if isinstance(value_of(a), Tensor) else self.full(a)  # noqa: E731
        args, kwargs = self.full.arguments(node, value)
        return self.full.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]

    def _leads(self, node: fx.Node) -> bool:
        """Whether a new dim comes before every other that is not one."""
        source: Any = node.args[0]
        dim: Any = node.args[1]
        shape = shape_of(value_of(source))
        place = dim if dim >= 0 else dim + len(shape) + 1
        return all(size == 1 for size in shape[: int(place)])
