"""What a model should take on a machine that is not here: a roofline over counted operations and bytes.

An operator takes as long as its operations at the machine's peak, or its bytes at its bandwidth, whichever is more
(Williams, Waterman, Patterson: Roofline, 2009). That is the least time; kernels, launches and everything that is
not fused come on top, for dense and routed alike.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from modpass import RoutedModel, decode_step, mod_transform, trace
from modpass.bench.cases import Case
from modpass.bench.gpus import Machine
from modpass.bench.inputs import inputs_at
from modpass.bench.sources import Source
from modpass.bench.traffic import Cost, costs
from modpass.bench.variants import make_variants
from modpass.errors import BlockError, ExportError, InputError
from modpass.exporters import FixedShape

__all__ = ["Decode", "Prediction", "Side", "predict", "ratio_at", "seconds_of"]


@dataclass(frozen=True)
class Decode:
    """One step of one token a row at a full cache: seconds, bytes read, bytes of the caches."""

    seconds: float
    bytes: float
    cache_bytes: int


@dataclass(frozen=True)
class Side:
    """Dense or routed: seconds and operations of a prefill, the share of the time that memory bounds, sizes in bytes.

    working: the operands and results of the largest operator, beside the weights.
    """

    seconds: float
    flops: int
    bytes: int
    memory_bound: float
    weights: int
    working: int
    decode: Decode | None

    @property
    def memory(self) -> int:
        """Bytes that the machine has to hold at least."""
        return self.weights + self.working + (0 if self.decode is None else self.decode.cache_bytes)


@dataclass(frozen=True)
class Prediction:
    """Dense beside routed on one machine; no_decode: why there is no decode."""

    case: Case
    machine: Machine
    dense: Side
    routed: Side
    no_decode: str | None


def seconds_of(found: Sequence[Cost], machine: Machine, dtype: str) -> float:
    """The least time of some operators.

    >>> machine = Machine("m", {"float32": 100.0}, 10.0, 1e9, "")
    >>> seconds_of([Cost("mm", 200, 10), Cost("cat", 0, 30)], machine, "float32")
    5.0
    """
    peak = machine.peak(dtype)
    return sum(max(c.flops / peak, c.bytes / machine.bandwidth) for c in found)


def predict(case: Case, source: Source, machine: Machine, decode: bool = True) -> Prediction:
    """Predict a prefill at the case's shape, and decode at the end of a cache of its sequence.

    A routed block's weights are read in a step only if one of the rows passes: with capacity c and B rows in
    1 - (1 - c)^B of the steps.

    Args:
        case: the shape, the dtype and the routing.
        source: the model.
        machine: where.
        decode: False leaves decode out.

    Raises:
        InputError: the case does not fit the model, or no peak is known in its dtype.
        TraceError, BlockError: the model cannot be traced or routed.
    """
    variants = make_variants(case, source)
    inputs = inputs_at(variants.routed.inputs, FixedShape(case.batch, case.sequence, dict(case.dims)))
    steps: dict[str, Decode] | None = None
    reason = None if decode else "it was left out"
    if decode:
        try:
            steps = _decodes(variants.case, source, machine)
        except (BlockError, InputError, ExportError) as e:
            reason = str(e)
    sides = {
        name: _side(model, inputs, machine, case.dtype, None if steps is None else steps[name])
        for name, model in variants.by_name().items()
    }
    return Prediction(variants.case, machine, sides["dense"], sides["routed"], reason)


def ratio_at(case: Case, source: Source, machine: Machine) -> float:
    """The speed-up of routed over dense that the roofline predicts for a prefill.

    Raises:
        InputError, TraceError, BlockError: as ``predict``.
    """
    found = predict(case, source, machine, decode=False)
    return found.dense.seconds / found.routed.seconds


def _side(
    model: RoutedModel, inputs: Mapping[str, Tensor], machine: Machine, dtype: str, decode: Decode | None
) -> Side:
    found = costs(model, inputs)
    seconds = seconds_of(found, machine, dtype)
    peak = machine.peak(dtype)
    bound = sum(c.bytes / machine.bandwidth for c in found if c.bytes / machine.bandwidth > c.flops / peak)
    weights = _size(model)
    return Side(
        seconds=seconds,
        flops=sum(c.flops for c in found),
        bytes=sum(c.bytes for c in found),
        memory_bound=bound / seconds if seconds else 0.0,
        weights=weights,
        working=max((c.bytes for c in found), default=0),
        decode=decode,
    )


def _size(module: nn.Module) -> int:
    """Bytes of parameters, each storage once."""
    sizes = {p.data_ptr(): p.numel() * p.element_size() for p in module.parameters()}
    return sum(sizes.values())


def _decodes(case: Case, source: Source, machine: Machine) -> dict[str, Decode]:
    """The step of the dense model, and that of the routed one with its blocks run as often as tokens pass.

    Steps are derived in float32, for rounding in half precision looks like a token that sees later ones; what they
    read is counted in the case's dtype.
    """
    if case.sequence is None:
        raise InputError("its inputs fix the sequence, so there is nothing to decode")
    model, example = source.model, source.example_inputs
    share = case.torch_dtype.itemsize / torch.float32.itemsize
    if share < 1:
        model = copy.deepcopy(model).float()
    if isinstance(model, RoutedModel) and model.routed_blocks:
        raise InputError("decode is predicted from the dense model; give the model itself")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        routed = mod_transform(
            model, case.capacity, every=case.every, parts=case.parts, selection="causal", example_inputs=example
        )
    found = {}
    for name, traced in (("dense", trace(model, example)), ("routed", routed)):
        step = decode_step(traced, batch=case.batch, max_sequence=case.sequence, padding=False)
        blocks = [str(n.target) for n in step.graph.nodes if n.op == "call_module"]  # the routed ones
        counted = costs(step, [torch.zeros(i.shape, dtype=i.dtype) for i in step.inputs], blocks)
        operators = [replace(c, bytes=int(share * c.bytes)) for c in counted]
        outside = [c for c in operators if not c.block]
        inside = [c for c in operators if c.block]
        runs = 1 - (1 - case.capacity) ** case.batch
        seconds = seconds_of(outside, machine, case.dtype) + runs * seconds_of(inside, machine, case.dtype)
        read = sum(c.bytes for c in outside) + runs * sum(c.bytes for c in inside)
        found[name] = Decode(seconds, read, int(share * sum(cache.bytes for cache in step.caches)))
    return found
