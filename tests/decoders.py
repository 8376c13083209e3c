"""Causal models of the zoo, traced once, and how to step through them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import modpass
from modpass.decode import PrefillModel, StepModel, decode_step, prefill
from modpass.decode.example import tiny_decoder
from modpass.exporters import export_decoder
from tests.zoo import ZOO, first, make

CAUSAL = ("llama", "gpt2", "mixtral", "inner-rotary", "tril-buffer", "alibi")
MASKED = ("llama", "gpt2", "mixtral")  # those that take a padding mask
LENGTH = 24


@cache
def dense(name: str) -> tuple[nn.Module, modpass.RoutedModel]:
    """A model of the zoo and its trace."""
    model = make(name)
    return model, modpass.trace(model, ZOO[name].example_inputs())


@cache
def causal(name: str, capacity: float, **options: Any) -> modpass.RoutedModel:
    """The same model routed with causal selection, counting on ``LENGTH`` tokens."""
    routed = modpass.mod_transform(
        dense(name)[0], capacity, selection="causal", example_inputs=ZOO[name].example_inputs(), **options
    )
    for i, block in enumerate(routed.routed_blocks.values()):
        draws = torch.Generator().manual_seed(i)
        with torch.no_grad():
            block.router.weight.copy_(torch.randn(block.width, generator=draws) * block.width**-0.5)
        block.max_sequence = LENGTH
    return routed


def ids_name(model: modpass.RoutedModel) -> str:
    """The name of the input for token ids."""
    return "ids" if "ids" in {s.name for s in model.inputs} else "input_ids"


def full_forward(model: modpass.RoutedModel, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits of one forward over everything."""
    given = {ids_name(model): ids} | ({} if mask is None else {"attention_mask": mask})
    with torch.no_grad():
        return first(model(**given))


@torch.no_grad()
def generated(
    model: modpass.RoutedModel, ids: Tensor, lengths: Tensor, mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Prefill the first ``lengths`` tokens of each row and step through as many as fit.

    Returns logits ``[B, T, V]``, the position of each ``[B, T]``, and the state after the last.
    """
    B, S = ids.shape
    n, rows = int(lengths.max()), torch.arange(B)
    first_part: PrefillModel = prefill(model, batch=B, sequence=n, max_sequence=S, padding=mask is not None)
    step: StepModel = decode_step(model, batch=B, max_sequence=S, padding=mask is not None, **options)
    whole = {} if mask is None else {"attention_mask": mask}
    prompt = {n_: m[:, :n] for n_, m in whole.items()}
    outputs, state = first_part.fill({ids_name(model): ids[:, :n], "length": lengths, **prompt})
    logits, positions = [next(iter(outputs.values()))[:, 0]], [lengths - 1]
    for t in range(S - n):
        at = lengths + t
        outputs = step.advance({ids_name(model): ids[rows, at][:, None], **whole}, at, state)
        logits.append(next(iter(outputs.values()))[:, 0])
        positions.append(at)
    return torch.stack(logits, 1), torch.stack(positions, 1), state


def tiny_folder(target: Path) -> Path:
    """The files of a tiny routed decoder for two rows over 11 tokens."""
    torch.manual_seed(0)
    export_decoder(tiny_decoder(True), target, batch=2, prompt=4, max_sequence=12)
    return target
