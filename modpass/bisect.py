"""Top-k without a TopK operator: TensorRT's takes at most 3840 of a row.

Shapes: B batch, S sequence, k chosen tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["TOPK_LIMIT", "beyond_topk", "bisect_select", "kth_largest"]

# ITopKLayer: "K exceeds the maximum value allowed (3840)". Below it TopK is faster.
TOPK_LIMIT = 3840

# TensorRT fuses the steps over a shorter row into one kernel, which takes it minutes to compile.
_SHORTEST = 16_384

_TINY = torch.finfo(torch.float32).tiny  # 2^-126: below it float32 is spaced evenly
_EXPONENTS = (127, 64, 32, 16, 8, 4, 2, 1)  # from 2^-126 they reach every power of two, and 2^128, which is infinity
_FRACTION = 23


def beyond_topk(k: int) -> bool:
    """Whether an exported graph selects k tokens without TopK: where k is known and above TensorRT's limit.

    >>> beyond_topk(3840), beyond_topk(3841)
    (False, True)
    """
    return isinstance(k, int) and k > TOPK_LIMIT


def kth_largest(scores_BS: Tensor, k: int) -> Tensor:
    """The k-th largest float32 of each row ``[B, 1]``, exactly; infinities are numbers here, NaN must not occur.

    It is found as a float is written: sign, then exponent, then the fraction bit by bit. Each step asks how many
    scores reach a candidate; all candidates are exact, so there is nothing to round. 33 steps whatever the values.

    >>> kth_largest(torch.tensor([[1.5, -2.0, 7.0, float("-inf")]]), 3).item()
    -2.0
    """
    positive_B1 = _count(scores_BS >= 0) >= k
    # of a negative k-th largest the size is sought: the (S - k + 1)-th largest of the scores with their sign turned
    size_BS = torch.where(positive_B1, scores_BS, -scores_BS)
    wanted_B1 = torch.where(positive_B1, float(k), float(scores_BS.shape[1] - k + 1))

    def reached(candidate_B1: Tensor) -> Tensor:
        return _count(size_BS >= candidate_B1) >= wanted_B1

    power_B1 = torch.full_like(scores_BS[:, :1], _TINY)
    normal_B1 = reached(power_B1)
    for exponent in _EXPONENTS:
        candidate_B1 = power_B1 * 2.0**exponent
        power_B1 = torch.where(reached(candidate_B1), candidate_B1, power_B1)
    found_B1, step_B1 = torch.where(normal_B1, power_B1, 0.0), power_B1
    for _ in range(_FRACTION):
        step_B1 = step_B1 * 0.5
        candidate_B1 = found_B1 + step_B1
        found_B1 = torch.where(reached(candidate_B1), candidate_B1, found_B1)
    return torch.where(positive_B1, found_B1, -found_B1)


def bisect_select(scores_BS: Tensor, k: int) -> Tensor:
    """The positions of the k largest scores, as ``select`` gives them, ``[B, k]`` int64, from comparisons and sums.

    Chosen are all above the k-th largest, and of those equal to it the first. They go to the front of a row of
    positions and the others behind them, each to a place of its own, so that one scatter without repeats does it.

    Shorter rows than TensorRT compiles quickly are filled up with -inf.

    >>> bisect_select(torch.tensor([[1.0, 3.0, 3.0, 3.0]]), 2).tolist()
    [[1, 2]]
    """
    # what is added behind ranks last of all equals, so it is never chosen while k <= S
    if scores_BS.shape[1] < _SHORTEST:
        scores_BS = F.pad(scores_BS, (0, _SHORTEST - scores_BS.shape[1]), value=float("-inf"))
    S = scores_BS.shape[1]
    threshold_B1 = kth_largest(scores_BS, k)
    above_BS, tie_BS = scores_BS > threshold_B1, scores_BS == threshold_B1
    room_B1 = k - _count(above_BS).to(torch.int64)
    chosen_BS = above_BS | (tie_BS & (_running(tie_BS) <= room_B1))
    position_S = torch.arange(S, device=scores_BS.device)
    before_BS = _running(chosen_BS)
    place_BS = torch.where(chosen_BS, before_BS - 1, k + position_S - before_BS)
    position_BS = position_S.expand_as(place_BS)
    return torch.zeros_like(place_BS).scatter(1, place_BS, position_BS)[:, :k]


def _count(true_BS: Tensor) -> Tensor:
    # float32 counts exactly up to 2^24 tokens, and ONNX Runtime sums it six times as fast as int64
    return true_BS.to(torch.float32).sum(1, keepdim=True)


def _running(true_BS: Tensor) -> Tensor:
    return true_BS.to(torch.int64).cumsum(1)
