"""Fused attention as torch's exporter takes it: on four dims, and zero where a mask of numbers leaves a row nothing.

``scaled_dot_product_attention`` takes any leading dims and any mask. The ONNX exporter refuses all but
``[B, H, S, D]``, and writes a plain softmax under a mask of numbers, in which a row of -inf is NaN where PyTorch has
zero. (It guards boolean masks by itself: masked_rows.py.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["ExportableAttention", "exportable_attention"]

_FUSED = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)


class ExportableAttention(TorchFunctionMode):
    """While this is entered, every fused attention runs as ``exportable_attention``.

    >>> x = torch.randn(2, 5, 8)
    >>> with ExportableAttention():
    ...     y = F.scaled_dot_product_attention(x, x, x)
    >>> torch.allclose(y, F.scaled_dot_product_attention(x, x, x), atol=1e-6)
    True
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``, or what stands for it."""
        return exportable_attention(func, args, kwargs or {}) if func in _FUSED else func(*args, **(kwargs or {}))


def exportable_attention(attend: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """What ``attend(*args, **kwargs)`` returns, by way of queries, keys and values ``[B, H, S, D]``.

    Masks broadcast from the right, so dims in front of fewer than four change none; of more than four all but the last
    three become one.

    >>> q = torch.randn(3, 2, 2, 4, 8)
    >>> exportable_attention(F.scaled_dot_product_attention, (q, q, q), {}).shape
    torch.Size([3, 2, 2, 4, 8])
    """
    names = ("query", "key", "value", "attn_mask")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mask, streams = given.get("attn_mask"), [given[n] for n in names[:3]]
    lead = torch.broadcast_shapes(*(t.shape[:-3] for t in streams))
    rank = max(t.dim() for t in streams)
    tensors = {n: _four(given[n], lead) for n in names if given.get(n) is not None}
    made = attend(**{**kwargs, **tensors}, **dict(zip(("dropout_p", "is_causal"), args[4:], strict=False)))
    if mask is not None and mask.is_floating_point():
        seen = tensors["attn_mask"].amax(-1, keepdim=True) != -torch.inf
        made = torch.where(seen, made, torch.zeros((), dtype=made.dtype, device=made.device))
    return made.unflatten(0, lead) if rank > 4 else made[(0,) * (4 - rank)] if rank < 4 else made


def _four(tensor: Tensor, lead: Sequence[int]) -> Tensor:
    """The tensor with four dims; ``lead``: the dims before the last three that attention runs over."""
    if tensor.dim() < 4:
        return tensor[(None,) * (4 - tensor.dim())]
    return tensor.expand(*lead, *tensor.shape[-3:]).flatten(0, -4) if len(lead) > 1 else tensor
