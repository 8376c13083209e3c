"""Choose the next token from logits."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import numpy as np

from modpass.errors import InputError

__all__ = ["Sampler", "is_whole"]


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number of Python or numpy; true and false are none.

    >>> is_whole(3), is_whole(np.int64(3)), is_whole(3.0), is_whole(True)
    (True, True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


class Sampler:
    """Takes the likeliest token, or draws one.

    temperature: 0 for the likeliest; above, the distribution's sharpness. top_k, top_p: keep the k likeliest tokens,
    or the fewest that hold probability p, before drawing (nucleus sampling, arXiv 1904.09751). seed: for repeatable
    draws.

    Raises:
        InputError: a value is not what is allowed.

    >>> Sampler()(np.array([[0.0, 2.0, 1.0]])).tolist()
    [1]
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> None:
        if not (_is_real(temperature) and 0 <= temperature < math.inf):
            raise InputError(f"temperature is {temperature!r}; it must be 0 (the likeliest token) or a number above")
        if top_k is not None and not (is_whole(top_k) and top_k >= 1):
            raise InputError(f"top_k is {top_k!r}; it must be None (all tokens) or a whole number of 1 or more")
        if top_p is not None and not (_is_real(top_p) and 0 < top_p <= 1):
            raise InputError(f"top_p is {top_p!r}; it must be None (all tokens) or a number in (0, 1]")
        if seed is not None and not (is_whole(seed) and seed >= 0):
            raise InputError(f"seed is {seed!r}; it must be None (draws differ) or a whole number of 0 or more")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.generator = np.random.default_rng(seed)

    def __call__(self, logits_BV: np.ndarray) -> np.ndarray:
        """The chosen ids ``[B]`` for logits ``[B, V]``."""
        if self.temperature == 0:
            likeliest: np.ndarray = logits_BV.argmax(-1)
            return likeliest
        return np.array([self._draw(row) for row in logits_BV.astype(np.float64) / self.temperature])

    def _draw(self, logits_V: np.ndarray) -> int:
        order = np.argsort(-logits_V, kind="stable")[: self.top_k]
        weights = np.exp(logits_V[order] - logits_V[order[0]])
        weights /= weights.sum()
        if self.top_p is not None:
            keep = int(np.searchsorted(weights.cumsum(), self.top_p) + 1)
            order, weights = order[:keep], weights[:keep] / weights[:keep].sum()
        return int(self.generator.choice(order, p=weights))
