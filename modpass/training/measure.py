"""What each block is worth: the model with it alone changed, all before it as the dense model has it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from modpass.errors import InputError
from modpass.routing import RoutedBlock
from modpass.training.distill import dense_mode
from modpass.training.losses import routed_blocks
from modpass.training.stream import Loss, call

__all__ = ["answering", "block_costs", "change_of", "give", "pass_by", "recorded", "skipped"]


@contextmanager
def skipped(model: nn.Module, names: Collection[str]) -> Iterator[nn.Module]:
    """Inside, these routed blocks are not run: every token passes them by, as where layers are dropped.

    Raises:
        InputError: the model has no routed block, or none of a name.

    >>> from modpass.decode.example import tiny_decoder
    >>> model, ids = tiny_decoder(True), torch.arange(8)[None]
    >>> with skipped(model, ["blocks.1"]): out = model(ids)
    >>> torch.equal(out, model(ids))
    False
    """
    blocks = routed_blocks(model)
    for name in names:
        if name not in blocks:
            raise InputError(f"there is no routed block '{name}'; there are: {', '.join(blocks)}")
    with answering({blocks[n]: pass_by for n in names}):
        yield model


@torch.no_grad()
def block_costs(
    model: nn.Module,
    batches: Collection[Any],
    loss: Loss | None = None,
    change: Callable[[str], AbstractContextManager[Any]] | None = None,
) -> dict[str, float]:
    """What the loss rises by where one block alone is changed and all others are dense; mean over batches.

    Blocks that ran before it give what they gave the dense model, so that half of the work is saved.

    Args:
        model: a routed model.
        batches: what it is called with: dicts, tuples or single tensors.
        loss: of ``(output, batch)``; None: the relative squared change of the model's first output.
        change: from a block's name to a context in which that block is changed; None: it is routed. With
            ``lambda name: skipped(model, [name])`` it is what dropping the block costs.

    Raises:
        InputError: the model has no routed block, or the loss is None and there is no output to compare.

    >>> from modpass.decode.example import tiny_decoder
    >>> list(block_costs(tiny_decoder(True).eval(), [torch.zeros(1, 8, dtype=torch.int64)]))
    ['blocks.1']
    """
    costs = dict.fromkeys(routed_blocks(model), 0.0)
    for batch in batches:
        with dense_mode(model), recorded(model) as given:
            dense = call(model, batch)
        level = 0.0 if loss is None else float(loss(dense, batch))
        before: dict[RoutedBlock, Callable[..., Tensor]] = {}
        for block, output in given.items():
            alone = dense_mode(model, but=[block.name]) if change is None else dense_mode(model)
            with alone, answering(before), change(block.name) if change else nullcontext():
                found = call(model, batch)
            rise = change_of(found, dense) if loss is None else float(loss(found, batch)) - level
            costs[block.name] += rise / len(batches)
            before[block] = partial(give, output)
    return costs


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[RoutedBlock, Tensor]]:
    """Collect what each routed block gives, in the order in which they run."""
    found: dict[RoutedBlock, Tensor] = {}

    def keep(module: Any, args: Any, output: Tensor) -> None:
        found[module] = output

    handles = [b.register_forward_hook(keep) for b in routed_blocks(model).values()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def answering(answers: Mapping[RoutedBlock, Callable[..., Tensor]]) -> Iterator[None]:
    """Inside, these blocks give what their answers say instead of running."""
    answers = dict(answers)
    for block, answer in answers.items():
        block.__dict__["forward"] = answer
    try:
        yield
    finally:
        for block in answers:
            block.__dict__.pop("forward", None)


def pass_by(x: Tensor, *_: Any) -> Tensor:
    """What a block answers that is not run."""
    return x


def give(output: Tensor, *_: Any) -> Tensor:
    """What a block answers whose output is known."""
    return output


def change_of(routed: Any, dense: Any) -> float:
    """The relative squared change of the first output.

    Raises:
        InputError: there is no output to compare.
    """
    own, wanted = (_first(o).float() for o in (routed, dense))
    return float((own - wanted).square().sum() / wanted.square().sum().clamp(min=1e-30))


def _first(output: Any) -> Tensor:
    leaves = (v for v in pytree.tree_leaves(output) if isinstance(v, Tensor) and v.is_floating_point() and v.dim())
    found = next(leaves, None)
    if found is None:
        raise InputError(
            "the model gives no floating-point tensor to compare; give loss=, a function of (output, batch)"
        )
    return found
