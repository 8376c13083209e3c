"""Routers fitted by least squares to a score of each token, on the dense model's stream.

Shapes: B batch, S sequence, k tokens taken, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modpass.errors import InputError
from modpass.functional import rank_scores, select, slots
from modpass.routing import RoutedBlock
from modpass.training.losses import routed_blocks
from modpass.training.scores import Score, takes_gradient
from modpass.training.stream import Loss, Seen, watch

__all__ = ["fit_routers"]

RIDGE = 1e-3  # of the mean square of the stream: keeps the fit sound where dims repeat one another


@torch.no_grad()
def fit_routers(
    model: nn.Module,
    batches: list[Any],
    score: Score,
    first_token: bool = True,
    held_out: list[Any] | None = None,
    loss: Loss | None = None,
) -> dict[str, float]:
    """Fit every router; returns, by block, the share of the k truly largest tokens of each row that it takes.

    first_token: that of each row counts as the one with the largest score, where there is a slot beside it.
    held_out: what that share is measured on; None: the same batches. loss: of ``(output, batch)``, for a score that
    takes its gradient.

    Raises:
        InputError: the score takes a gradient and there is no loss, or none that has one.

    >>> from modpass.decode.example import tiny_decoder
    >>> from modpass.training.scores import hidden_norm
    >>> list(fit_routers(tiny_decoder(True), [torch.arange(10).reshape(1, 10)], hidden_norm))
    ['blocks.1']
    """
    if takes_gradient(score) and loss is None:
        raise InputError("the score takes the gradient of a loss, and there is none; give loss=, of (output, batch)")
    slope = loss if takes_gradient(score) else None
    fits = {block: _Fit(block, score, first_token) for block in routed_blocks(model).values()}
    watch(model, batches, partial(_each_row, fits, _Fit.add), slope)
    for fit in fits.values():
        fit.solve()
    watch(model, batches if held_out is None else held_out, partial(_each_row, fits, _Fit.compare), slope)
    return {fit.block.name: fit.taken / fit.wanted if fit.wanted else 1.0 for fit in fits.values()}


def _each_row(fits: Mapping[RoutedBlock, _Fit], step: Callable[[_Fit, Tensor, Tensor, int], None], seen: Seen) -> None:
    fit = fits[seen.block]
    fit.matters |= seen.gradient is None or bool(seen.gradient.any())
    for row in fit.rows(seen):
        step(fit, *row)


class _Fit:
    """The normal equations of one router, summed over rows, and how well their solution chooses."""

    def __init__(self, block: RoutedBlock, score: Score, first_token: bool) -> None:
        self.block, self.score, self.capacity, self.first_token = block, score, block.capacity, first_token
        D, device = block.width, block.router.weight.device
        self.gram = torch.zeros(D, D, dtype=torch.float64, device=device)
        self.moment = torch.zeros(D, dtype=torch.float64, device=device)
        self.tokens = self.taken = self.wanted = 0
        self.matters = False

    def add(self, x_SD: Tensor, target_S: Tensor, k: int) -> None:
        """Add one row's real tokens."""
        tokens = x_SD.double()
        self.tokens += len(tokens)
        self.gram += tokens.T @ tokens
        self.moment += tokens.T @ _centred(target_S, k).double()

    def solve(self) -> None:
        """Set the router to the least-squares solution."""
        name, D = self.block.name, len(self.moment)
        if not self.tokens:
            raise InputError(f"block '{name}' got no real token to fit its router on; are the batches padding alone?")
        if not self.matters:
            raise InputError(
                f"the loss does not depend on what block '{name}' gives; give one of the whole model's output"
            )
        if not (self.gram.isfinite().all() and self.moment.isfinite().all()):
            raise InputError(f"block '{name}' was given or gave values that are not finite; calibrate in float32")
        ridge = (RIDGE * self.gram.trace() / D).clamp(min=1e-12)
        eye = torch.eye(D, dtype=torch.float64, device=self.gram.device)
        self.block.router.weight.copy_(torch.linalg.solve(self.gram + ridge * eye, self.moment))

    def compare(self, x_SD: Tensor, target_S: Tensor, k: int) -> None:
        """Count which of one row's k largest tokens the router takes."""
        own = select(rank_scores(self.block.router(x_SD[None])), k)
        best = select(rank_scores(target_S[None]), k)
        self.taken += int(torch.isin(own, best).sum())
        self.wanted += k

    def rows(self, seen: Seen) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Each row's real tokens, their scores, and how many of them the block takes."""
        x_BSD, keep_BS, k = seen.before, seen.keep, slots(self.capacity, seen.before.shape[1])
        given = [t for t in (seen.before, seen.after, seen.gradient) if t is not None]
        scores_BS: Any = self.score(*(t.clone() for t in given))  # it may write to them; the model goes on with its own
        if not (isinstance(scores_BS, Tensor) and scores_BS.is_floating_point()):
            found_type = scores_BS.dtype if isinstance(scores_BS, Tensor) else type(scores_BS).__name__
            raise InputError(
                f"score gave {found_type} for block '{self.block.name}'; it must be a floating-point tensor"
            )
        if scores_BS.shape != x_BSD.shape[:2]:
            found, wanted = list(scores_BS.shape), list(x_BSD.shape[:2])
            raise InputError(f"score gave the shape {found} for block '{self.block.name}'; it must be {wanted}")
        for b, row in enumerate(x_BSD):
            real = slice(None) if keep_BS is None else keep_BS[b] != 0
            found_S = scores_BS[b][real].clone()
            if self.first_token and min(k, len(found_S)) > 1:
                found_S[0] = found_S.max()
            if len(found_S):
                yield row[real], found_S, min(k, len(found_S))


def _centred(target_S: Tensor, k: int) -> Tensor:
    """In units of its spread, zero between the k-th largest and the next; all ones where every token is taken."""
    if k >= len(target_S):
        return torch.ones_like(target_S)
    top = target_S.sort(descending=True).values
    return (target_S - (top[k - 1] + top[k]) / 2) / target_S.std().clamp(min=1e-12)
