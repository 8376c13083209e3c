"""Counted operations of a routed model and of each routed block, dense and routed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from modpass.training.distill import dense_mode
from modpass.training.losses import routed_blocks

__all__ = ["counted", "flop_counter"]


def flop_counter() -> FlopCounterMode:
    """A counter that knows attention on the CPU too, which torch counts on a GPU alone.

    >>> with flop_counter() as counter: out = torch.ones(2, 3) @ torch.ones(3, 5)
    >>> counter.get_total_flops()
    60
    """
    return FlopCounterMode(
        display=False,
        custom_mapping={torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops},
    )


def counted(model: nn.Module, call: Callable[[], Any]) -> tuple[int, dict[str, tuple[int, int]]]:
    """The operations of ``call`` when no block is routed, and those of each routed block: dense, and routed.

    >>> from modpass.decode.example import tiny_decoder
    >>> model = tiny_decoder(True)
    >>> total, blocks = counted(model, lambda: model(torch.zeros(1, 8, dtype=torch.int64)))
    >>> blocks["blocks.1"][0] > blocks["blocks.1"][1]
    True
    """
    with dense_mode(model):
        total, dense = _count(model, call)
    _, routed = _count(model, call)
    return total, {name: (dense[name], routed[name]) for name in dense}


def _count(model: nn.Module, call: Callable[[], Any]) -> tuple[int, dict[str, int]]:
    with torch.no_grad(), flop_counter() as counter, _by_block(model, counter) as blocks:
        call()
    return counter.get_total_flops(), dict(blocks)


@contextmanager
def _by_block(model: nn.Module, counter: FlopCounterMode) -> Iterator[dict[str, int]]:
    spent: dict[str, int] = {}

    def enter(name: str, *_: Any) -> None:
        spent[name] = spent.get(name, 0) - counter.get_total_flops()

    def leave(name: str, *_: Any) -> None:
        spent[name] += counter.get_total_flops()

    handles = []
    for name, block in routed_blocks(model).items():
        handles.append(block.register_forward_pre_hook(partial(enter, name)))
        handles.append(block.register_forward_hook(partial(leave, name)))
    try:
        yield spent
    finally:
        for handle in handles:
            handle.remove()


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    flops: int = sdpa_flop_count(query, key, value)
    return flops
