"""``mod_transform``: trace, find, route."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from modpass.blocks import Blocks, locate
from modpass.describing import describe
from modpass.errors import InputError
from modpass.finishing import finish, parameters_of
from modpass.functional import check_capacity
from modpass.installing import install_blocks, routed_block
from modpass.model import RoutedModel
from modpass.padding_mask import PaddingMask
from modpass.parts import Parts
from modpass.picking import Chosen, capacities_of, pick
from modpass.routing import Gate, Selection, choose_option
from modpass.tracing import Traced, capture

__all__ = ["mod_transform", "route_traced", "trace"]


def mod_transform(
    model: nn.Module | ExportedProgram,
    capacity: float | Mapping[str, float] = 0.125,
    *,
    every: int = 2,
    blocks: Chosen | None = None,
    gate: Gate = "linear",
    selection: Selection = "expert_choice",
    example_inputs: Any = None,
    padding_mask: str = "attention_mask",
    parts: Parts = "block",
    check: bool | None = None,
    predictor: bool = False,
    checkpoint: bool = False,
    budget: float | None = None,
    calibration: Iterable[Any] | None = None,
    generator: torch.Generator | None = None,
) -> RoutedModel:
    """Turn a model into a Mixture-of-Depths model (arXiv 2404.02258); the model itself is left as it was.

    Args:
        model: an ``nn.Module``, a ``torch.export.ExportedProgram`` or a ``torch.fx.GraphModule``.
        capacity: the share of the sequence that goes through a routed block, in (0, 1], or a share per block name.
        every: route every ``every``-th block of a stack, starting with the ``every``-th (the paper: 2).
        blocks: names of blocks, or a predicate on the found blocks, instead of ``every``. "auto": those that cost
            least, with routers fitted, by ``modpass.training.calibrate``; needs ``budget`` and ``calibration``.
        gate: what the block's change is multiplied by: "linear" r = w . x (the paper), "sigmoid", or "unit" (1).
        selection: "expert_choice" (top-k of the router) or "stochastic" (top-k of noise, the paper's control).
        example_inputs: a tuple, a dict or ``(tuple, dict)``; may be left out where the model says what it takes.
        padding_mask: the ``[batch, sequence]`` input whose zeros are padding, which never takes a slot from a
            real token; "~name" where its ones are.
        parts: "block" routes a whole block; "attention" or "mlp" routes only that residual branch of it. "mlp" also
            takes tokens in two dims, ``[B, C, H, W]`` or ``[B, H, W, C]``; convolutions before it see all of them.
        check: run blocks on the example inputs with their tokens permuted and some left out, and refuse one whose
            tokens meet outside attention. None: blocks that hold an operator unknown to modpass; True: every
            block; False: none, and unknown operators are refused.
        predictor: give each routed block a small MLP that decides in its router's place under "causal"
            selection; ``modpass.training.routing_losses`` trains it, without a gradient into the model.
        checkpoint: run the body of a routed block again in the backward pass instead of keeping what it computed.
        budget: for "auto", the share of the dense model's operations that may remain.
        calibration: for "auto", the batches to calibrate on.
        generator: draws the noise of "stochastic".

    Returns:
        A graph module that is called like the model, shares its parameters by name and storage, and adds
        ``<block>.router.weight`` of shape ``[D]`` (and ``<block>.predictor.*``) to each routed block.

    Raises:
        InputError: an argument is not what is allowed.
        TraceError: the model cannot be traced.
        BlockError: a named block cannot be routed, or none was found.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> list(mod_transform(encoder, 0.5, example_inputs=(torch.randn(2, 6, 8),)).routed_blocks)
    ['layers.1']
    """
    choose_option("gate", gate, Gate)
    choose_option("selection", selection, Selection)
    choose_option("parts", parts, Parts)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise InputError(f"every is {every!r}; it must be a whole number of 1 or more")
    if not isinstance(capacity, Mapping):
        check_capacity(capacity)
    if (blocks == "auto") != (budget is not None) or (budget is None) != (calibration is None):
        raise InputError('blocks="auto", budget= and calibration= belong together; give all three or none')
    if budget is not None and calibration is not None:
        from modpass.training.auto import route_within  # which needs this module

        options: dict[str, Any] = {"gate": gate, "selection": selection, "example_inputs": example_inputs}
        options |= {"padding_mask": padding_mask, "parts": parts, "check": check, "predictor": predictor}
        options |= {"checkpoint": checkpoint, "generator": generator}
        return route_within(model, calibration, budget, capacity, **options)
    traced = capture(model, example_inputs)
    result = route_traced(
        traced,
        locate(traced, check, parts),
        capacity,
        every=every,
        blocks=blocks,
        gate=gate,
        selection=selection,
        padding_mask=padding_mask,
        parts=parts,
        predictor=predictor,
    )
    for block in result.routed_blocks.values():
        block.checkpoint = checkpoint
    return result.seed(generator)


def route_traced(
    traced: Traced,
    found: Blocks,
    capacity: float | Mapping[str, float],
    *,
    every: int = 2,
    blocks: Chosen | None = None,
    gate: Gate = "linear",
    selection: Selection = "expert_choice",
    padding_mask: str = "attention_mask",
    parts: Parts = "block",
    predictor: bool = False,
) -> RoutedModel:
    """``mod_transform`` of a model that is traced already and whose blocks are located, for the same ``parts``.

    The trace is used up, but not by an error.

    Raises:
        InputError, BlockError: as ``mod_transform``.
    """
    picked = pick(found, every, blocks)
    capacities = capacities_of(capacity, picked, found)
    settings: dict[str, Any] = {"capacity": capacities, "gate": gate, "selection": selection}
    settings |= {"padding_mask": padding_mask, "parts": parts, "predictor": predictor}
    info = describe(traced, found, settings)
    mask = PaddingMask(traced, padding_mask, found)
    keeper = parameters_of(traced)
    install_blocks(
        traced.graph_module,
        picked,
        parts,
        lambda plan: routed_block(plan, capacities[plan.name], gate, selection, predictor),
        mask,
    )
    return finish(traced, info, keeper)


def trace(model: nn.Module | ExportedProgram, example_inputs: Any = None) -> RoutedModel:
    """The dense model through the very same path: a ``RoutedModel`` with no routed block.

    Raises:
        TraceError: the model cannot be traced.
        InputError: no example inputs were given and the model does not say what it takes.

    >>> trace(nn.Linear(3, 3), (torch.randn(2, 3),)).routed_blocks
    {}
    """
    traced = capture(model, example_inputs)
    return finish(traced, describe(traced, locate(traced), {}), parameters_of(traced))
