"""A routed block for one token a row: it decides, reads its own cache of k slots, and may be skipped.

Shapes: B rows, N slots of the block's cache, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from modpass.causal import dependent
from modpass.decode.copy import CacheSpec, StepCopy
from modpass.decode.worlds import FullLength
from modpass.dropout import undo_dropout
from modpass.errors import BlockError
from modpass.functional import Gather, take
from modpass.functional import slots as slots_of
from modpass.routing import RoutedBlock
from modpass.sizes import Refusal, Sizes
from modpass.symbols import shape_of, value_of

__all__ = ["Skipping", "StepBlock"]

Skipping = Literal["masked", "conditional", "batch_capacity"]


class StepBlock(nn.Module):
    """One step of a ``RoutedBlock``: ``forward(x, keep, position, count, places, *caches, *sides)``.

    Returns the stream, the new count of each row, and the rows that the caches are to hold for the tokens taken.
    ``queries`` and ``keys`` say how each side input comes to a step: its query dims are reduced to the token's
    position by the caller, its key dims here to the places of the tokens in the cache.
    """

    def __init__(self, block: RoutedBlock, rows: int, slots: int, known: dict[Any, int], skipping: str) -> None:
        super().__init__()
        self.name, self.slots, self.seq_dim, self.skipping = block.name, slots, block.seq_dim, skipping
        self.rows = slots_of(block.capacity, rows) if skipping == "batch_capacity" else rows
        self.body, self.caches, self.queries, self.keys = _step_body(block, slots, known, self.rows)
        for cache in self.caches:
            cache.shape = (cache.shape[0] // self.rows * rows, *cache.shape[1:])
        self._block = [block]  # in a list: its parameters are registered where the model has them

    @property
    def block(self) -> RoutedBlock:
        """The routed block that this is a step of."""
        return self._block[0]

    def forward(
        self, x: Tensor, keep_B1: Tensor | None, position_B: Tensor, count_B: Tensor, places_BN: Tensor, *given: Tensor
    ) -> tuple[Tensor, ...]:
        """Step the stream ``[B, 1, D]`` (or ``[1, B, D]``)."""
        x_B1D = x if self.seq_dim == 1 else x.transpose(0, 1)
        scores_B1 = self.block.router(x_B1D)
        taken_B = self.block.passes(self.block.logits(x_B1D, scores_B1), keep_B1)[:, 0] & (count_B < self.slots)
        caches, sides = given[: len(self.caches)], given[len(self.caches) :]
        operands = (x_B1D, scores_B1, position_B, count_B, places_BN, *caches, *sides)
        if self.skipping == "batch_capacity":
            taken_B, out_B1D, rows = self._top_rows(taken_B, operands)
        elif self.skipping == "conditional":
            out_B1D, *rows = _branch(taken_B.any(), self._compute, self._skip, operands)
        else:
            out_B1D, *rows = self._compute(*operands)
        out_B1D = torch.where(taken_B[:, None, None], out_B1D, x_B1D)
        out = out_B1D if self.seq_dim == 1 else out_B1D.transpose(0, 1)
        return (out, count_B + taken_B, *rows)

    def _compute(
        self, x_B1D: Tensor, scores_B1: Tensor, position_B: Tensor, count_B: Tensor, places_BN: Tensor, *given: Tensor
    ) -> tuple[Tensor, ...]:
        caches, sides = given[: len(self.caches)], given[len(self.caches) :]
        slot_B = count_B.clamp(max=self.slots - 1)
        slot_is = torch.arange(self.slots, device=slot_B.device) == slot_B[:, None]
        at_BN = torch.where(slot_is, position_B[:, None], places_BN)
        seen = [s if g is None else take(s, at_BN, g) for s, g in zip(sides, self.keys, strict=True)]
        x = x_B1D if self.seq_dim == 1 else x_B1D.transpose(0, 1)
        y, *rows = self.body(x, slot_B, *caches, *seen, *self.block.own())
        y_B1D = y if self.seq_dim == 1 else y.transpose(0, 1)
        return tuple(_own(t) for t in (self.block.combine(x_B1D, y_B1D, scores_B1), *rows))

    def _skip(self, x_B1D: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        caches = given[4 : 4 + len(self.caches)]
        rows = (c.narrow(spec.dim, 0, 1) for spec, c in zip(self.caches, caches, strict=True))
        return (_own(x_B1D), *(torch.zeros(r.shape, dtype=r.dtype, device=r.device) for r in rows))

    def _top_rows(self, taken_B: Tensor, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Compute the best rows by score alone; the others wait for another token."""
        B = taken_B.shape[0]
        ranked_B = torch.where(taken_B, operands[1][:, 0], float("-inf"))
        best_R = ranked_B.topk(self.rows).indices
        dims = [self._row_dim(i, o, B) for i, o in enumerate(operands)]
        part = [o if d is None else o.index_select(d, best_R) for o, d in zip(operands, dims, strict=True)]
        out_R1D, *rows_R = self._compute(*part)
        out_B1D = operands[0].index_copy(0, best_R, out_R1D)
        rows = [
            torch.zeros_like(c.narrow(spec.dim, 0, 1)).index_copy(self._batch(c, B), best_R, r)
            for spec, c, r in zip(self.caches, operands[5:], rows_R, strict=False)
        ]
        is_best_B = torch.zeros_like(taken_B).index_fill(0, best_R, True)
        return taken_B & is_best_B, out_B1D, rows

    def _row_dim(self, i: int, operand: Tensor, B: int) -> int | None:
        sides_from = 5 + len(self.caches)
        if i < sides_from:
            return self._batch(operand, B)
        gather = self.queries[i - sides_from] or self.keys[i - sides_from]
        if gather is None or operand.dim() != gather.rank or operand.shape[gather.batch] == 1:
            return None
        if operand.shape[gather.batch] != B:
            raise BlockError(
                f"block '{self.name}' holds heads merged into the batch; batch_capacity cannot pick its rows"
            )
        return gather.batch

    def _batch(self, operand: Tensor, B: int) -> int:
        if operand.shape[0] != B:
            raise BlockError(
                f"block '{self.name}' has a cache without a batch dim; batch_capacity cannot pick its rows"
            )
        return 0


def _own(x: Tensor) -> Tensor:
    """A copy, as the outputs of a conditional may share no memory."""
    return x.clone(memory_format=torch.contiguous_format)


def _branch(pred: Tensor, yes: Any, no: Any, operands: tuple[Tensor, ...]) -> Any:
    """One of two functions: a conditional of the graph where one is made, plain Python in eager mode."""
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return torch.cond(pred, yes, no, operands)
    return yes(*operands) if pred else no(*operands)


Gathers = tuple[Gather | None, ...]


def _step_body(
    block: RoutedBlock, slots: int, known: dict[Any, int], rows: int
) -> tuple[fx.GraphModule, tuple[CacheSpec, ...], Gathers, Gathers]:
    """The body on one token, ``(x, slot_B, *caches, *sides, *owned)``, its caches, and how sides are gathered."""
    source = undo_dropout(block.body)
    stream, *rest = [n for n in source.nodes if n.op == "placeholder"]
    sides = dict(zip(rest, block.gathers, strict=False))
    shape = shape_of(value_of(stream))
    sizes = Sizes(shape[1 - block.seq_dim], shape[block.seq_dim])
    copy = _BodyCopy(source, stream, sides, sizes, {**known, sizes.batch: rows}, slots)
    module = fx.GraphModule(copy.tables(), copy.graph, "StepBody")
    queries, keys = zip(*(copy.split[s] for s in sides), strict=True) if sides else ((), ())
    return module, tuple(copy.caches), queries, keys


class _BodyCopy(StepCopy):
    """A block's body, whose side inputs come as placeholders and are split into query and key dims."""

    def __init__(
        self,
        source: fx.Graph,
        stream: fx.Node,
        sides: dict[fx.Node, Gather | None],
        sizes: Sizes,
        known: dict[Any, int],
        slots: int,
    ) -> None:
        tokens = dependent(source, stream)
        super().__init__(fx.Graph(), tokens, sizes, known, slots, self._side)
        self.gathers = sides
        self.split: dict[fx.Node, tuple[Gather | None, Gather | None]] = {s: (None, None) for s in sides}
        self.step[stream] = self.graph.placeholder("x")
        self.inner.add(stream)
        self.slot = self.graph.placeholder("slot")
        self.declare()
        rest = [n for n in source.nodes if n.op == "placeholder" and n is not stream]
        self.outer = {n: self.graph.placeholder(n.name) for n in rest}
        self.full = FullLength(self.graph, nn.Module(), sizes, slots, known)
        self.full.copies |= self.outer
        self.run()
        output = next(n for n in source.nodes if n.op == "output")
        self.graph.output((self.step[output.args[0]], *self.new_rows()))

    def tables(self) -> nn.Module:
        holder = nn.Module()
        for name, value in self.full.tables.items():
            holder.register_buffer(name, value, persistent=False)
        return holder

    def _side(self, consumer: fx.Node, side: fx.Node) -> Any:
        if side not in self.gathers:
            return self._made_inside(consumer, side)
        gather = self.gathers[side]
        if gather is not None:
            keyed = self.sees_keys(consumer)
            last = gather.rank - 1
            queries = tuple(d for d in gather.dims if not (keyed and d == last))
            keys = tuple(d for d in gather.dims if keyed and d == last)
            before = self.split[side]
            self.split[side] = (
                replace(gather, dims=queries) if queries else None,
                replace(gather, dims=keys, batched=gather.batched or bool(queries)) if keys else None,
            )
            if before not in ((None, None), self.split[side]):
                raise Refusal(f"the side input {side.name} follows keys here and queries there (node {consumer.name})")
        return self.outer[side]

    def _made_inside(self, consumer: fx.Node, side: fx.Node) -> Any:
        """A parameter, or a tensor with one value in every place, of which any row will do."""
        made = self.full(side)
        shape = shape_of(value_of(side))
        keyed = self.sees_keys(consumer)
        for dim, size in enumerate(shape):
            if self.sizes.carries(size) and not (keyed and dim == len(shape) - 1):
                made = self.graph.call_function(torch.narrow, (made, dim, 0, 1))
        return made
