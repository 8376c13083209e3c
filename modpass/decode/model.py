"""The decode step as a module: what it takes and returns, and the state between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, fx, nn

from modpass.errors import InputError
from modpass.model import RoutedModel

__all__ = ["Cache", "PrefillModel", "Routing", "State", "StepInfo", "StepModel", "TensorInput"]


@dataclass(frozen=True)
class TensorInput:
    """An input that the caller gives at every step."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class State:
    """What is remembered of the last tokens outside attention; a step gives all of it anew, under ``name``.new."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size in memory."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Cache(State):
    """A cache of keys or values: ``dim`` counts its slots; block: the routed block that owns it, or None."""

    dim: int
    block: str | None = None


@dataclass(frozen=True)
class Routing:
    """The state of one routed block: how many of its slots are taken in each row, and by which positions."""

    block: str
    slots: int
    caches: tuple[Cache, ...]

    @property
    def count(self) -> str:
        """The name of the ``[B]`` input that counts taken slots."""
        return f"{self.block}.count"

    @property
    def places(self) -> str:
        """The name of the ``[B, slots]`` input that holds the position in each slot."""
        return f"{self.block}.places"


@dataclass(frozen=True)
class StepInfo:
    """What a decode step takes and returns."""

    batch: int
    max_sequence: int
    tokens: tuple[TensorInput, ...]
    dense_caches: tuple[Cache, ...]
    states: tuple[State, ...]
    routing: tuple[Routing, ...]
    model_outputs: tuple[str, ...]


class _Derived(fx.GraphModule):
    """A graph on a model's own parameters, with tables and parts made for it."""

    @classmethod
    def build(
        cls,
        model: RoutedModel,
        graph: fx.Graph,
        info: StepInfo,
        tables: Mapping[str, Tensor],
        modules: Mapping[str, nn.Module],
    ) -> Self:
        """Put the graph on the model's parameters, which stay shared with it by name and storage."""
        root = nn.Module()
        for slot in ("_parameters", "_buffers", "_modules"):
            object.__setattr__(root, slot, dict(getattr(model, slot)))
        for name, value in tables.items():
            root.register_buffer(name, value, persistent=False)
        for name, module in modules.items():
            root.add_module(name, module)
        made = cls(root, graph, cls.__name__)
        made.graph.eliminate_dead_code()
        made.recompile()
        for name, block in model.routed_blocks.items():
            made.add_submodule(name, block)
        made._non_persistent_buffers_set |= set(tables)
        made.meta["modpass.step"] = info
        return made.eval()

    @property
    def info(self) -> StepInfo:
        """What the step takes and returns."""
        found: StepInfo = self.meta["modpass.step"]
        return found

    @property
    def routing(self) -> tuple[Routing, ...]:
        """The routed blocks, in order."""
        return self.info.routing

    @property
    def caches(self) -> tuple[Cache, ...]:
        """Every cache, in the order of the inputs."""
        return (*self.info.dense_caches, *(c for r in self.info.routing for c in r.caches))


class PrefillModel(_Derived):
    """A whole prompt, ``[B, S]``: the model's outputs, and the state that ``StepModel`` goes on with."""

    @property
    def inputs(self) -> tuple[TensorInput, ...]:
        """Every input in order."""
        return self.info.tokens

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs, in order: the model's own, caches, states, then those of each routed block."""
        info = self.info
        whole = [v.name for v in info.dense_caches + info.states]
        routed = [n for r in info.routing for n in (r.count, r.places, *(c.name for c in r.caches))]
        return (*info.model_outputs, *whole, *routed)

    def fill(self, inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The model's outputs for a prompt, and the state for ``StepModel.advance``.

        inputs: tokens ``[B, S]``, masks, and ``length`` ``[B]`` (left out: every row is whole).

        Raises:
            InputError: an input is missing.
        """
        first = self.info.tokens[0]
        given = {"length": torch.full((first.shape[0],), first.shape[1]), **inputs}
        missing = [t.name for t in self.inputs if t.name not in given]
        if missing:
            raise InputError(f"input '{missing[0]}' is missing; it takes: {', '.join(t.name for t in self.inputs)}")
        found = dict(zip(self.output_names, self(*(given[t.name] for t in self.inputs)), strict=True))
        outputs = {n: found.pop(n) for n in self.info.model_outputs}
        return outputs, found


class StepModel(_Derived):
    """One token a row, ``[B, 1]``, over caches."""

    @property
    def inputs(self) -> tuple[TensorInput, ...]:
        """Every input in order, the caches and the routing state too."""
        info, wide = self.info, torch.int64
        given = {t.name: t for t in info.tokens}
        given["position"] = TensorInput("position", (info.batch,), wide)
        given["live"] = TensorInput("live", (info.batch,), torch.bool)
        given |= {v.name: TensorInput(v.name, v.shape, v.dtype) for v in (*self.caches, *info.states)}
        for r in info.routing:
            given[r.count] = TensorInput(r.count, (info.batch,), wide)
            given[r.places] = TensorInput(r.places, (info.batch, r.slots), wide)
        return tuple(given[n] for n in self.input_names)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs, in order."""
        found: tuple[str, ...] = self.meta["modpass.inputs"]
        return found

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs, in order: the model's own, new cache rows, new states, new counts."""
        info = self.info
        rows = [f"{v.name}.new" for v in (*info.dense_caches, *info.states)]
        routed = [n for r in info.routing for n in (f"{r.count}.new", *(f"{c.name}.new" for c in r.caches))]
        return (*info.model_outputs, *rows, *routed)

    def state(self, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Empty caches, states and routing state, by input name."""
        own = {v.name for v in (*self.caches, *self.info.states)} | {
            n for r in self.routing for n in (r.count, r.places)
        }
        return {i.name: torch.zeros(i.shape, dtype=i.dtype, device=device) for i in self.inputs if i.name in own}

    def advance(self, inputs: Mapping[str, Tensor], position: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Step once: returns the model's outputs for these tokens, and writes ``state`` in place.

        inputs: the tokens ``[B, 1]`` and masks by name; position: ``[B]``, where each token stands in its row.
        ``live`` ``[B]`` may be left out: every row is live. What is remembered of a row that is not stays as it was.

        Raises:
            InputError: an input is missing.
        """
        given = {"live": torch.ones_like(position, dtype=torch.bool), **inputs, "position": position, **state}
        missing = [n for n in self.input_names if n not in given]
        if missing:
            raise InputError(f"input '{missing[0]}' is missing; the step takes: {', '.join(self.input_names)}")
        if not bool(((position >= 0) & (position < self.info.max_sequence)).all()):
            raise InputError(
                f"position is {position.tolist()}; the caches hold positions 0 to {self.info.max_sequence - 1}"
            )
        found = dict(zip(self.output_names, self(*(given[n] for n in self.input_names)), strict=True))
        for cache in self.info.dense_caches:
            _write(state[cache.name], found[f"{cache.name}.new"], cache.dim, position)
        for kept in self.info.states:
            whole = state[kept.name]
            rows = given["live"].repeat_interleave(len(whole) // len(position))
            whole[rows] = found[f"{kept.name}.new"][rows]
        for routing in self.routing:
            self._settle(routing, found, position, state)
        return {n: found[n] for n in self.info.model_outputs}

    def _settle(self, routing: Routing, found: Mapping[str, Tensor], position: Tensor, state: dict[str, Any]) -> None:
        """Write the rows of those tokens that took a slot."""
        count, after = state[routing.count], found[f"{routing.count}.new"]
        for row in (after > count).nonzero().flatten().tolist():
            slot = int(count[row])
            state[routing.places][row, slot] = position[row]
            for cache in routing.caches:
                part = slice(row, row + 1)
                _write(state[cache.name], found[f"{cache.name}.new"], cache.dim, count, _rows(cache, part, len(count)))
        count.copy_(after)


def _rows(cache: Cache, part: slice, rows: int) -> slice:
    """The rows of a cache that belong to one row of the batch, heads merged in or not."""
    each = cache.shape[0] // rows
    return slice(part.start * each, part.stop * each)


def _write(cache: Tensor, new: Tensor, dim: int, place_B: Tensor, only: slice | None = None) -> None:
    """Put ``new``, one slot long, at ``place`` of each row."""
    each = cache.shape[0] // len(place_B)
    for row in range(cache.shape[0])[only or slice(None)]:
        cache[row].select(dim - 1, int(place_B[row // each])).copy_(new[row].select(dim - 1, 0))
