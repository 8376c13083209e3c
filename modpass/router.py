"""What scores a token: the router, and the predictor that says causally what the router's top-k will be.

Shapes: B batch, S sequence, D width.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from modpass.functional import router_scores

__all__ = ["Predictor", "Router"]


class _Float32(nn.Module):
    """A module that follows device moves, but stays float32 when the model is cast."""

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for parameter in self.parameters():
            if parameter.is_floating_point() and parameter.dtype != torch.float32:
                parameter.data = parameter.data.float()
        return self


class Router(_Float32):
    """Scores tokens by a linear projection of the stream, always in float32 (paper section 3.4)."""

    def __init__(self, width: int, device: torch.device | None = None) -> None:
        super().__init__()
        bound = width**-0.5
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32, device=device).uniform_(-bound, bound))

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Scores ``[B, S]`` of the stream ``[B, S, D]``."""
        return router_scores(x_BSD, self.weight)


class Predictor(_Float32):
    """A small MLP that tells from a token alone whether the router's top-k takes it (paper section 3.5).

    No gradient flows back into the stream, so that it learns without a say in what the model computes. Always
    in float32, under autocast too.
    """

    def __init__(self, width: int, device: torch.device | None = None) -> None:
        super().__init__()
        hidden = max(8, width // 4)
        self.up = nn.Linear(width, hidden, dtype=torch.float32, device=device)
        self.down = nn.Linear(hidden, 1, dtype=torch.float32, device=device)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Logits ``[B, S]`` of the stream ``[B, S, D]``; above zero: the token goes through."""
        kind = x_BSD.device.type
        if torch.compiler.is_exporting() or not torch.is_autocast_enabled(kind):
            return self._logits(x_BSD)
        with torch.autocast(kind, enabled=False):
            return self._logits(x_BSD)

    def _logits(self, x_BSD: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(x_BSD.detach().float()))
        logits: Tensor = self.down(hidden)
        return logits.squeeze(-1)
