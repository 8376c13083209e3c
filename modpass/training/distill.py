"""Learning from the dense model: its logits, and its hidden states after each routed block.

Shapes: B batch, S sequence, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from modpass.errors import InputError
from modpass.training.losses import real_mean, routed_blocks

__all__ = ["block_outputs", "dense_mode", "distillation_loss", "hidden_losses", "routers_only"]


def routers_only(model: nn.Module) -> list[nn.Parameter]:
    """Freeze all but routers and predictors, and return their parameters for the optimizer.

    Undo it with ``model.requires_grad_(True)``.

    Raises:
        InputError: the model has no routed block.

    >>> from modpass.decode.example import tiny_decoder
    >>> [tuple(p.shape) for p in routers_only(tiny_decoder(True))]
    [(8,)]
    """
    blocks = routed_blocks(model)
    model.requires_grad_(False)
    parts = [p for b in blocks.values() for p in (b.router, b.predictor) if p is not None]
    found = [p for part in parts for p in part.parameters()]
    for parameter in found:
        parameter.requires_grad_(True)
    return found


@contextmanager
def dense_mode(model: nn.Module, but: Collection[str] = ()) -> Iterator[nn.Module]:
    """Inside, routed blocks (but those named) take every token with weight 1: the dense model, on the same weights.

    A copy made before training is a teacher: ``teacher = copy.deepcopy(routed)``. Where the model's own weights
    are frozen (``routers_only``) it is its own teacher.

    Raises:
        InputError: the model has no routed block.

    >>> from modpass.decode.example import tiny_decoder
    >>> import torch
    >>> ids = torch.zeros(1, 8, dtype=torch.int64)
    >>> with dense_mode(tiny_decoder(True)) as dense: dense(ids).shape
    torch.Size([1, 8, 11])
    """
    names = ("capacity", "gate", "training_selection", "eval_selection", "max_sequence", "last")
    blocks = [b for n, b in routed_blocks(model).items() if n not in but]
    before = [{name: getattr(b, name) for name in names} for b in blocks]
    try:
        for block in blocks:
            block.capacity, block.gate = 1.0, "unit"
            block.training_selection, block.eval_selection = "expert_choice", None
        yield model
    finally:
        for block, values in zip(blocks, before, strict=True):
            for name, value in values.items():
                setattr(block, name, value)


@contextmanager
def block_outputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Collect, inside, the stream ``[B, S, D]`` after each routed block of the last forward, by block name.

    Raises:
        InputError: the model has no routed block.

    >>> from modpass.decode.example import tiny_decoder
    >>> import torch
    >>> model = tiny_decoder(True)
    >>> with block_outputs(model) as found: out = model(torch.zeros(1, 8, dtype=torch.int64))
    >>> found["blocks.1"].shape
    torch.Size([1, 8, 8])
    """
    found: dict[str, Tensor] = {}

    def keep(name: str, module: Any, args: Any, output: Tensor) -> None:
        found[name] = output if module.seq_dim == 1 else output.transpose(0, 1)

    handles = [b.register_forward_hook(partial(keep, n)) for n, b in routed_blocks(model).items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def distillation_loss(
    logits: Tensor, teacher: Tensor, *, temperature: float = 1.0, keep: Tensor | None = None
) -> Tensor:
    """How far the model's ``[B, S, V]`` distribution is from the teacher's: the mean divergence per real token.

    ``KL(teacher || model)`` at ``temperature``, times its square, so that gradients keep their size (Hinton et
    al., arXiv 1503.02531). No gradient goes to the teacher. keep: nonzero at real tokens ``[B, S]``.

    Raises:
        InputError: the temperature is not above 0.

    >>> import torch
    >>> distillation_loss(torch.ones(1, 2, 3), torch.ones(1, 2, 3)).item()
    0.0
    """
    if temperature <= 0:
        raise InputError(f"temperature is {temperature!r}; it must be above 0")
    own = F.log_softmax(logits.float() / temperature, -1)
    wanted = F.log_softmax(teacher.detach().float() / temperature, -1)
    divergence = F.kl_div(own, wanted, reduction="none", log_target=True).sum(-1)
    return real_mean(divergence, keep) * temperature**2


def hidden_losses(
    outputs: Mapping[str, Tensor], teacher: Mapping[str, Tensor], *, keep: Tensor | None = None
) -> dict[str, Tensor]:
    """For each routed block, the squared distance of its hidden states from the teacher's, over their mean square.

    outputs, teacher: what ``block_outputs`` collected of each; keep: nonzero at real tokens ``[B, S]``.

    Raises:
        InputError: the teacher has no such block.

    >>> import torch
    >>> hidden_losses({"a": torch.zeros(1, 2, 3)}, {"a": torch.ones(1, 2, 3)})["a"].item()
    1.0
    """
    found: dict[str, Tensor] = {}
    for name, own in outputs.items():
        if name not in teacher:
            raise InputError(f"the teacher has no output of block '{name}'; it has: {', '.join(teacher) or 'none'}")
        wanted = teacher[name].detach().float()
        distance = real_mean((own.float() - wanted).square().mean(-1), keep)
        found[name] = distance / real_mean(wanted.square().mean(-1), keep).clamp(min=1e-12)
    return found
