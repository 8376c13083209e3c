"""The dense model's stream before and after each routed block, and how a loss depends on it.

Shapes: B batch, S sequence, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modpass.errors import InputError
from modpass.routing import RoutedBlock
from modpass.training.distill import dense_mode
from modpass.training.losses import routed_blocks

__all__ = ["Loss", "Seen", "call", "watch"]

Loss = Callable[[Any, Any], Any]  # of (output, batch)


@dataclass(frozen=True)
class Seen:
    """One run of a block: the stream ``[B, S, D]`` before and after it in float32, nonzero at real tokens ``[B, S]``
    (None: all are), and the loss's gradient ``[B, S, D]`` there, where one was asked for.
    """

    block: RoutedBlock
    before: Tensor
    after: Tensor
    keep: Tensor | None
    gradient: Tensor | None = None


def call(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch: a dict is keyword arguments, a tuple or list positional ones.

    >>> call(nn.Identity(), (1,))
    1
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


@torch.no_grad()
def watch(model: nn.Module, batches: list[Any], see: Callable[[Seen], None], loss: Loss | None = None) -> None:
    """Run the dense model on each batch, and ``see`` every routed block of it; no gradient is left on the model.

    loss: of ``(output, batch)``, whose gradient after each block is wanted; blocks are then seen after the run.

    Raises:
        InputError: the loss is no scalar that has a gradient.

    >>> from modpass.decode.example import tiny_decoder
    >>> watch(tiny_decoder(True), [torch.arange(8)[None]], lambda seen: print(tuple(seen.after.shape)))
    (1, 8, 8)
    """
    for batch in batches:
        with dense_mode(model):
            if loss is None:
                with _hooked(model, lambda *run: see(_seen(*run))):
                    call(model, batch)
                continue
            for seen in _with_gradients(model, batch, loss):
                see(seen)


def _with_gradients(model: nn.Module, batch: Any, loss: Loss) -> list[Seen]:
    runs: list[tuple[RoutedBlock, tuple[Any, ...], Tensor]] = []

    def hook(block: RoutedBlock, args: tuple[Any, ...], output: Tensor) -> None:
        output.requires_grad_()  # where all that came before it is frozen, gradients begin here
        runs.append((block, args, output))

    with torch.enable_grad(), _hooked(model, hook):
        value = loss(call(model, batch), batch)
    if not (isinstance(value, Tensor) and value.dim() == 0 and value.requires_grad):
        raise InputError(f"the loss gave {_described(value)}; a score that takes its gradient needs a scalar with one")
    # Not ``backward``, which would leave gradients on the parameters.
    after = [output for _, _, output in runs]
    gradients = torch.autograd.grad(value, after, allow_unused=True, materialize_grads=True)
    return [_seen(*run, gradient) for run, gradient in zip(runs, gradients, strict=True)]


def _seen(block: RoutedBlock, args: tuple[Any, ...], output: Tensor, gradient: Tensor | None = None) -> Seen:
    def plain(t: Tensor) -> Tensor:
        own = t.detach().float()
        return own if block.seq_dim == 1 else own.transpose(0, 1)

    return Seen(block, plain(args[0]), plain(output), args[1], None if gradient is None else plain(gradient))


@contextmanager
def _hooked(model: nn.Module, hook: Callable[[Any, Any, Any], None]) -> Iterator[None]:
    handles = [block.register_forward_hook(hook) for block in routed_blocks(model).values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {list(value.shape)}" + ("" if value.requires_grad else " without a gradient")
