"""Routers fitted by least squares to a score of each token, on the dense model's stream.

Shapes: B batch, S sequence, k tokens taken, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modpass.functional import rank_scores, select, slots
from modpass.routing import RoutedBlock
from modpass.training.distill import dense_mode
from modpass.training.losses import routed_blocks

__all__ = ["Score", "call", "fit_routers"]

Score = Callable[[Tensor, Tensor], Tensor]

RIDGE = 1e-4  # of the mean square of the stream: keeps the fit sound where dims repeat one another


def call(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch: a dict is keyword arguments, a tuple or list positional ones.

    >>> call(nn.Identity(), (1,))
    1
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


@torch.no_grad()
def fit_routers(model: nn.Module, batches: list[Any], score: Score) -> dict[str, float]:
    """Fit every router; returns, by block, the share of the k truly largest tokens of each row that it takes.

    >>> from modpass.decode.example import tiny_decoder
    >>> from modpass.training.scores import hidden_norm
    >>> list(fit_routers(tiny_decoder(True), [torch.arange(10).reshape(1, 10)], hidden_norm))
    ['blocks.1']
    """
    fits = {name: _Fit(block, score) for name, block in routed_blocks(model).items()}
    for step in (_Fit.add, _Fit.compare):
        with dense_mode(model), _hooked(fits, step):
            for batch in batches:
                call(model, batch)
        if step is _Fit.add:
            for fit in fits.values():
                fit.solve()
    return {name: fit.taken / fit.wanted if fit.wanted else 1.0 for name, fit in fits.items()}


class _Fit:
    """The normal equations of one router, summed over rows, and how well their solution chooses."""

    def __init__(self, block: RoutedBlock, score: Score) -> None:
        self.block, self.score, self.capacity = block, score, block.capacity
        D, device = block.width, block.router.weight.device
        self.gram = torch.zeros(D, D, dtype=torch.float64, device=device)
        self.moment = torch.zeros(D, dtype=torch.float64, device=device)
        self.taken = self.wanted = 0

    def add(self, x_SD: Tensor, target_S: Tensor, k: int) -> None:
        """Add one row's real tokens."""
        tokens = x_SD.double()
        self.gram += tokens.T @ tokens
        self.moment += tokens.T @ _centred(target_S, k).double()

    def solve(self) -> None:
        """Set the router to the least-squares solution."""
        D = len(self.moment)
        ridge = RIDGE * self.gram.trace() / D * torch.eye(D, dtype=torch.float64, device=self.gram.device)
        self.block.router.weight.copy_(torch.linalg.solve(self.gram + ridge, self.moment))

    def compare(self, x_SD: Tensor, target_S: Tensor, k: int) -> None:
        """Count which of one row's k largest tokens the router takes."""
        own = select(rank_scores(self.block.router(x_SD[None])), k)
        best = select(rank_scores(target_S[None]), k)
        self.taken += int(torch.isin(own, best).sum())
        self.wanted += k

    def rows(self, x_BSD: Tensor, y_BSD: Tensor, keep_BS: Tensor | None) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Each row's real tokens, their scores, and how many of them the block takes."""
        scores_BS, k = self.score(x_BSD, y_BSD), slots(self.capacity, x_BSD.shape[1])
        for b, row in enumerate(x_BSD):
            real = slice(None) if keep_BS is None else keep_BS[b] != 0
            if len(row[real]):
                yield row[real], scores_BS[b][real], min(k, len(row[real]))


@contextmanager
def _hooked(fits: Mapping[str, _Fit], step: Callable[[_Fit, Tensor, Tensor, int], None]) -> Iterator[None]:
    def hook(fit: _Fit, block: RoutedBlock, args: tuple[Any, ...], output: Tensor) -> None:
        before, after = (t.float() if block.seq_dim == 1 else t.float().transpose(0, 1) for t in (args[0], output))
        for row in fit.rows(before, after, args[1]):
            step(fit, *row)

    handles = [fit.block.register_forward_hook(partial(hook, fit)) for fit in fits.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _centred(target_S: Tensor, k: int) -> Tensor:
    """In units of its spread, zero between the k-th largest and the next; all ones where every token is taken."""
    if k >= len(target_S):
        return torch.ones_like(target_S)
    top = target_S.sort(descending=True).values
    return (target_S - (top[k - 1] + top[k]) / 2) / target_S.std().clamp(min=1e-12)
