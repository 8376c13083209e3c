"""The variants of a pretrained model that a study compares: whole, with layers dropped, or routed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from modpass import RoutedModel
from modpass.bench.flops import FlopCount, count_flops
from modpass.training import BlockCalibration, skipped
from modpass.training.calibration import pick

__all__ = ["Variant", "applied", "chosen", "operations"]


@dataclass(frozen=True)
class Variant:
    """One row of the study.

    layers: its operations are those of the model with so many layers dropped, or less if it is routed; how: "dense",
    "drop" (what costs least alone), "spaced" (dropped at equal distances) or "route"; parts: whole blocks, or the
    MLP of each; capacity: of the routed blocks; tune: what is trained afterwards: nothing, "routers", "lora" (on
    the text, routers too) or "distil" (the same, from the dense model).
    """

    name: str
    layers: int = 0
    how: Literal["dense", "drop", "spaced", "route"] = "dense"
    parts: Literal["block", "mlp"] = "block"
    capacity: float = 1.0
    tune: Literal["", "routers", "lora", "distil"] = ""


@contextmanager
def applied(model: RoutedModel, variant: Variant, names: Sequence[str]) -> Iterator[RoutedModel]:
    """Inside, the named blocks are dropped or routed; all others take every token."""
    with ExitStack() as stack:
        for name, block in model.routed_blocks.items():
            block.capacity = variant.capacity if variant.how == "route" and name in names else 1.0
            stack.callback(setattr, block, "capacity", 1.0)
        if variant.how in ("drop", "spaced"):
            stack.enter_context(skipped(model, names))
        yield model


def operations(model: RoutedModel, variant: Variant, names: Sequence[str], ids: Tensor) -> int:
    """Counted operations of the variant for tokens ``[B, S]``."""
    with applied(model, variant, names):
        return count_flops(model, {"input_ids": ids}).total


def chosen(model: RoutedModel, variant: Variant, costs: Mapping[str, float], budget: int, ids: Tensor) -> list[str]:
    """The blocks to drop or to route.

    costs: what each block costs alone, dropped or routed. budget: the operations of the model with
    ``variant.layers`` whole layers dropped. Routing goes below it, dropping parts of layers stays above it: any
    doubt is to the favour of dropping.
    """
    blocks = list(model.routed_blocks)
    if variant.how == "spaced":
        step = len(blocks) / variant.layers
        return [blocks[int((i + 0.5) * step)] for i in range(variant.layers)]
    if variant.how == "dense":
        return []
    dense, changed = _counts(model, Variant("dense"), ids), _counts(model, variant, ids)
    if variant.how == "route":
        found = {n: BlockCalibration(1.0, costs[n], (dense.blocks[n], changed.blocks[n])) for n in blocks}
        return list(pick(found, dense.total, budget / dense.total))
    names, left = list[str](), dense.total
    for name in sorted(blocks, key=costs.__getitem__):
        left -= dense.blocks[name] - changed.blocks.get(name, 0)
        if left < budget:
            break
        names.append(name)
    return names


def _counts(model: RoutedModel, variant: Variant, ids: Tensor) -> FlopCount:
    """With every block changed; what one saves does not depend on the others."""
    blocks = list(model.routed_blocks)
    with applied(model, variant, blocks):
        return count_flops(model, {"input_ids": ids}, blocks)
