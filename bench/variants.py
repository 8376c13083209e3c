"""The two models that a case compares: dense and routed, traced the same way from the same weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import nn

from modpass import RoutedModel, mod_transform, trace
from modpass.bench.cases import Case
from modpass.bench.flops import paths_of
from modpass.bench.measuring import Original
from modpass.bench.offline import transformers_offline
from modpass.bench.sources import Source
from modpass.errors import InputError

__all__ = ["Variants", "make_variants"]


@dataclass(frozen=True)
class Variants:
    """Both models, sharing the dense one's weights, and the case as it is really measured.

    original: the dense model before its trace, for those who want to export it by themselves; None where only the
    trace is there.
    """

    dense: RoutedModel
    routed: RoutedModel
    case: Case
    original: Original | None = None

    @property
    def blocks(self) -> tuple[str, ...]:
        """Every block that repeats, routed or not, in order: the routed ones and their siblings."""
        routed = dict.fromkeys(self.routed.routed_blocks)
        stacks = {name.rpartition(".")[0] for name in routed}
        paths = (path for node in self.dense.graph.nodes for path in sorted(paths_of(node)))
        return tuple(
            dict.fromkeys(p for p in paths if p.rpartition(".")[0] in stacks and p.rpartition(".")[2].isdigit())
        )

    def by_name(self) -> dict[str, RoutedModel]:
        """``"dense"`` and ``"routed"``, in this order."""
        return {"dense": self.dense, "routed": self.routed}


def make_variants(case: Case, source: Source) -> Variants:
    """Trace the model dense, and routed as the case says.

    A model that is routed already keeps its routing and routers, and the case is made to say so. Else routers
    are random, from the case's seed: their weights decide which tokens are taken, not how many.

    Raises:
        InputError: the case's settings, or the example inputs, do not fit the model.
        TraceError: the model cannot be traced.
        BlockError: it has no block that can be routed.
    """
    _check_dtype(case, source)
    if isinstance(source.model, RoutedModel) and source.model.routed_blocks:
        again = _dense_again(source.model, source.name)
        dense = trace(again)
        original = Original(again, dense.info.call.constants)
        return Variants(dense, source.model, _as_routed(case, source.model), original)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        routed = mod_transform(
            source.model,
            case.capacity,
            every=case.every,
            gate=case.gate,
            selection=case.selection,
            parts=case.parts,
            example_inputs=source.example_inputs,
        )
    dense = trace(source.model, source.example_inputs)
    traced = isinstance(source.model, RoutedModel)
    return Variants(dense, routed, case, None if traced else Original(source.model, dense.info.call.constants))


def _dense_again(model: RoutedModel, name: str) -> nn.Module:
    """The dense model that a routed one was made from, with the routed one's weights."""
    origin = model.info.source
    if origin["kind"] != "huggingface":
        raise InputError(
            f"'{name}' is routed already, and its dense baseline cannot be built again, for it is of no "
            "Hugging Face class; give the dense model as package.module:factory"
        )
    architecture = getattr(transformers_offline("hf"), origin["class"])
    dense: nn.Module = architecture(architecture.config_class.from_dict(origin["config"]))
    # Not strict: routers have no place in it, and buffers that are not saved are its own.
    missing, _ = dense.load_state_dict(model.state_dict(), strict=False, assign=True)
    if missing:
        raise InputError(f"'{name}' lacks weights of its dense baseline: {', '.join(missing)}")
    return dense.eval()


def _as_routed(case: Case, model: RoutedModel) -> Case:
    """The case with the settings that a routed model brings; its capacity is the mean where blocks differ."""
    blocks = list(model.routed_blocks.values())
    capacity = fmean(block.capacity for block in blocks)
    settings = model.settings
    own = {name: settings[name] for name in ("gate", "selection", "parts") if name in settings}
    return replace(case, capacity=capacity, **own)


def _check_dtype(case: Case, source: Source) -> None:
    """Figures of another dtype than the report names would be false."""
    # One-dimensional ones may differ: routers and norms are often kept in float32.
    dtypes = {p.dtype for p in source.model.parameters() if p.is_floating_point() and p.dim() > 1}
    if dtypes and case.torch_dtype not in dtypes:
        found = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise InputError(
            f"the weights of '{source.name}' are {found}, the case says {case.dtype}; "
            "the model of a factory, or a saved one, keeps its own dtype: name that"
        )
