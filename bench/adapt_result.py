"""What is kept of one variant of a study."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["AdaptResult"]


@dataclass(frozen=True)
class AdaptResult:
    """blocks: those routed, with their capacities, or dropped, with 0; flops: operations over the dense model's;
    losses: nats per held-out token.
    """

    variant: dict[str, Any]
    blocks: dict[str, float]
    flops: float
    losses: dict[str, float]

    def perplexity(self, text: str) -> float:
        """Of the held-out part of a text.

        >>> AdaptResult({}, {}, 1.0, {"a": 0.0}).perplexity("a")
        1.0
        """
        return math.exp(self.losses[text])
