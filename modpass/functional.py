"""The pure tensor functions of routing (Mixture-of-Depths, arXiv 2404.02258, section 3).

Shapes: B batch, S sequence, k chosen tokens, D width. ``x_BSD`` is the residual stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from modpass.bisect import beyond_topk, bisect_select
from modpass.errors import CapacityError

__all__ = [
    "Gather",
    "check_capacity",
    "gather_tokens",
    "rank_scores",
    "router_scores",
    "select",
    "slots",
    "take",
    "write_back",
]


def check_capacity(capacity: float, block: str = "the block") -> float:
    """Return ``capacity`` as a float in (0, 1].

    Raises:
        CapacityError: it is not a number in (0, 1].

    >>> check_capacity(0.125)
    0.125
    """
    if isinstance(capacity, bool) or not isinstance(capacity, int | float) or not 0.0 < float(capacity) <= 1.0:
        raise CapacityError(
            f"capacity of {block} is {capacity!r}; it must be a number in (0, 1]: the share of the sequence "
            "that goes through the block (the paper's best is 0.125)"
        )
    return float(capacity)


def slots(capacity: float, sequence: int) -> int:
    """The number k of tokens that go through: ``max(1, floor(capacity * sequence + 1e-6))``.

    The one place of this rule (paper section 3.1). The small term keeps 0.29 * 100 at 29.

    >>> [slots(0.125, s) for s in (1024, 16, 12, 7)]
    [128, 2, 1, 1]
    """
    if isinstance(sequence, int):
        return max(1, math.floor(capacity * sequence + 1e-6))
    k: int = torch.sym_max(1, torch.sym_int(capacity * sequence + 1e-6))  # type: ignore[unreachable]
    return k


def router_scores(x_BSD: Tensor, weight_D: Tensor) -> Tensor:
    """Router scores ``[B, S]`` in float32 whatever the stream's dtype (paper section 3.4: r = w . x).

    A product and a sum, not a matmul: half-precision scores change which tokens are chosen, and a one-column
    matmul costs a transposed copy of the stream in TensorRT.

    >>> router_scores(torch.ones(1, 2, 3), torch.ones(3)).tolist()
    [[3.0, 3.0]]
    """
    return (x_BSD.float() * weight_D.float()).sum(-1)


def rank_scores(scores_BS: Tensor, keep_BS: Tensor | None = None) -> Tensor:
    """Scores made comparable: NaN and -inf rank below every number, padding below those.

    ``keep_BS`` is nonzero for real tokens. NaN gets no slot while a number is left; a NaN token that is chosen
    all the same keeps its NaN, so that the fault stays visible.

    >>> rank_scores(torch.tensor([[float("nan"), 0.0]])).argmax().item()
    1
    """
    low, high = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
    ranked = torch.where(scores_BS.isnan(), low, scores_BS).clamp(low, high)
    return ranked if keep_BS is None else torch.where(keep_BS != 0, ranked, float("-inf"))


def select(scores_BS: Tensor, k: int) -> Tensor:
    """The positions of the k largest scores of each row, ascending, ``[B, k]`` int64; ties go to the lowest index.

    Eager PyTorch leaves ties of ``topk`` open, so it sorts stably; an exported graph holds TopK, whose
    operator specification gives ties to the lowest index, and above TensorRT's limit on k a bisection.

    Raises:
        CapacityError: k exceeds the sequence length.

    >>> select(torch.tensor([[1.0, 3.0, 3.0, 3.0]]), 2).tolist()
    [[1, 2]]
    """
    if torch.compiler.is_exporting():
        return bisect_select(scores_BS, k) if beyond_topk(k) else scores_BS.topk(k, dim=1).indices.sort(dim=1).values
    if k > scores_BS.shape[1]:
        raise CapacityError(f"{k} tokens asked for, but the sequence holds {scores_BS.shape[1]}")
    order_BS = scores_BS.sort(dim=1, descending=True, stable=True).indices
    return order_BS[:, :k].sort(dim=1).values


def _rows(index_Bk: Tensor) -> Tensor:
    return torch.arange(index_Bk.shape[0], device=index_Bk.device).unsqueeze(1)


def gather_tokens(x_BSD: Tensor, index_Bk: Tensor) -> Tensor:
    """The chosen tokens ``[B, k, ...]`` of ``[B, S, ...]``.

    Plain indexing exports to GatherND, which is far faster than GatherElements with an expanded index.

    >>> gather_tokens(torch.arange(6.0).view(1, 3, 2), torch.tensor([[2]])).tolist()
    [[[4.0, 5.0]]]
    """
    return x_BSD[_rows(index_Bk), index_Bk]


def write_back(x_BSD: Tensor, update_BkD: Tensor, index_Bk: Tensor) -> Tensor:
    """The stream with the chosen tokens replaced by ``update_BkD``; the others pass unchanged.

    Without any scatter reduction, which TensorRT refuses. Eager code writes by index; an exported graph reads
    through a small map ``[B, S]`` instead, which saves a copy of the stream in TensorRT.

    >>> write_back(torch.zeros(1, 2, 1), torch.ones(1, 1, 1), torch.tensor([[1]])).flatten().tolist()
    [0.0, 1.0]
    """
    if not torch.compiler.is_exporting():
        return x_BSD.index_put((_rows(index_Bk), index_Bk), update_BkD)
    B, k = index_Bk.shape
    slot_Bk = torch.arange(k, device=x_BSD.device).unsqueeze(0).expand(B, k)
    own_BS = torch.arange(k, k + x_BSD.shape[1], device=x_BSD.device).unsqueeze(0).expand(B, -1)
    source_BS = own_BS.scatter(1, index_Bk, slot_Bk)
    return gather_tokens(torch.cat([update_BkD, x_BSD], 1), source_BS)


@dataclass(frozen=True)
class Gather:
    """How a side input of a block (mask, rotary table, bias) follows the chosen tokens.

    rank: what its consumer broadcasts it to; ones are put in front up to it. batch: its batch dim after that;
    batched: whether that dim has the batch's size (else 1). repeat: rows per batch entry where heads are merged
    into the batch. dims: its sequence dims, each reduced from S to k.
    """

    rank: int
    batch: int
    batched: bool
    dims: tuple[int, ...]
    repeat: int = 1

    def __str__(self) -> str:
        """Say it in words: ``dims 2, 3 at the chosen tokens``."""
        return f"dim{'s' * (len(self.dims) > 1)} {', '.join(map(str, self.dims))} at the chosen tokens"


def take(side: Tensor, index_Bk: Tensor, gather: Gather) -> Tensor:
    """Gather a side input along every one of its sequence dims at the chosen tokens.

    >>> take(torch.eye(3), torch.tensor([[0, 2]]), Gather(3, 0, False, (1, 2))).tolist()
    [[[1.0, 0.0], [0.0, 1.0]]]
    """
    side = side[(None,) * (gather.rank - side.dim())]
    if gather.repeat > 1:
        index_Bk = index_Bk.repeat_interleave(gather.repeat, 0)
    batched = gather.batched
    for dim in gather.dims:
        front = side.movedim((gather.batch, dim), (0, 1))
        taken = gather_tokens(front, index_Bk) if batched else front[0][index_Bk]
        side, batched = taken.movedim((0, 1), (gather.batch, dim)), True
    return side
