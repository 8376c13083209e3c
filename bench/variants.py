"""The two models that a case compares: dense and routed, traced the same way from the same weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from modpass import RoutedModel, mod_transform, trace
from modpass.bench.cases import Case
from modpass.bench.sources import Source

__all__ = ["Variants", "make_variants"]


@dataclass(frozen=True)
class Variants:
    """Both models; they share the weights of the dense one."""

    dense: RoutedModel
    routed: RoutedModel

    def by_name(self) -> dict[str, RoutedModel]:
        """``"dense"`` and ``"routed"``, in this order."""
        return {"dense": self.dense, "routed": self.routed}


def make_variants(case: Case, source: Source) -> Variants:
    """Trace the model dense, and routed as the case says.

    A model that is routed already keeps its own routing and routers. Else routers are random, from the case's
    seed: their weights decide which tokens are taken, not how many.

    Raises:
        InputError: the case's settings, or the example inputs, do not fit the model.
        TraceError: the model cannot be traced.
        BlockError: it has no block that can be routed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        routed = mod_transform(
            source.model,
            case.capacity,
            every=case.every,
            gate=case.gate,
            selection=case.selection,
            example_inputs=source.example_inputs,
        )
    return Variants(trace(source.model, source.example_inputs), routed)
