"""What the routers do: shares, how well the causal decision meets the top-k, histograms and positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modpass.routing import LastForward, RoutedBlock
from modpass.training.losses import last_forward, membership, routed_blocks

__all__ = ["BlockStats", "routing_stats", "scalars"]


@dataclass(frozen=True)
class BlockStats:
    """One routed block in the last forward, real tokens alone.

    share: of the tokens, those that went through; precision, recall, accuracy: of the causal decision (the
    predictor's, else the router's) against the top-k membership; counts: a histogram of the router's scores, and
    the edges of its bins, one more; positions: the share of rows in which each position went through ``[S]``.
    """

    share: float
    precision: float
    recall: float
    accuracy: float
    counts: tuple[int, ...]
    edges: tuple[float, ...]
    positions: tuple[float, ...]


@torch.no_grad()
def routing_stats(model: nn.Module, bins: int = 20) -> dict[str, BlockStats]:
    """Statistics of each routed block by name, from the last forward, in training or eval mode.

    Precision is 1 where nothing is predicted, recall where nothing is to be found.

    Raises:
        InputError: the model has no routed block, or one that has not run yet.

    >>> from modpass.decode.example import tiny_decoder
    >>> model = tiny_decoder(True)
    >>> out = model(torch.zeros(1, 8, dtype=torch.int64)); list(routing_stats(model))
    ['blocks.1']
    """
    return {name: _stats(block, last_forward(name, block), bins) for name, block in routed_blocks(model).items()}


def scalars(stats: dict[str, BlockStats], front: str = "routing") -> dict[str, float]:
    """The plain numbers, by names for a logger: ``routing/<block>/share`` and so on, and their means.

    >>> scalars({"a": BlockStats(0.5, 1.0, 1.0, 0.75, (), (), ())})["routing/a/accuracy"]
    0.75
    """
    kinds = ("share", "precision", "recall", "accuracy")
    found = {f"{front}/{n}/{k}": float(getattr(s, k)) for n, s in stats.items() for k in kinds}
    means = {f"{front}/{k}": sum(getattr(s, k) for s in stats.values()) / len(stats) for k in kinds if stats}
    return {**means, **found}


def _stats(block: RoutedBlock, last: LastForward, bins: int) -> BlockStats:
    real = torch.ones_like(last.scores, dtype=torch.bool) if last.keep is None else last.keep != 0
    went = _went(last) & real
    top, said = membership(block, last) & real, (last.logits > 0) & real
    counts, edges = _histogram(last.scores[real], bins)
    positions = went.sum(0) / real.sum(0).clamp(min=1)
    return BlockStats(
        share=_share(went.sum(), real.sum(), 0.0),
        precision=_share((top & said).sum(), said.sum(), 1.0),
        recall=_share((top & said).sum(), top.sum(), 1.0),
        accuracy=_share(((top == said) & real).sum(), real.sum(), 1.0),
        counts=counts,
        edges=edges,
        positions=tuple(positions.tolist()),
    )


def _went(last: LastForward) -> Tensor:
    """Who went through ``[B, S]``; a free slot points one past the end."""
    B, S = last.scores.shape
    went = torch.zeros(B, S + 1, dtype=torch.bool, device=last.scores.device)
    return went.scatter(1, last.index, True)[:, :S]


def _share(part: Tensor, whole: Tensor, empty: float) -> float:
    return float(part / whole) if whole else empty


def _histogram(scores: Tensor, bins: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    finite = scores[scores.isfinite()].float().cpu()
    if not finite.numel():
        return (), ()
    counts, edges = torch.histogram(finite, bins)
    return tuple(int(c) for c in counts), tuple(edges.tolist())
