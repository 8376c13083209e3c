"""A decoder in a few lines, its operations counted by hand, and a runner that runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, HEADS, HIDDEN, VOCABULARY, LAYERS = 32, 4, 64, 50, 4


class Layer(nn.Module):
    """A pre-norm decoder layer in a few lines."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x_BSD: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x_BSD)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x_BSD = x_BSD + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BSD + self.mlp(self.norm2(x_BSD))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x_BSD = self.embed(input_ids)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.head(x_BSD)


def decoder() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Decoder().eval(), {"input_ids": torch.arange(22).view(2, 11)}


def layer_flops(tokens: int) -> int:
    """A product [m, k] x [k, n] is 2mnk operations."""
    linear = 2 * tokens * WIDTH * (3 * WIDTH + WIDTH + HIDDEN + HIDDEN)
    attention = 2 * (2 * tokens * tokens * WIDTH)
    return linear + attention


@dataclass(frozen=True)
class Counting:
    """A runner whose calls only count; its routed model is twice as fast by an own clock of rounds."""

    name: str = "counting"
    device: str = "cpu"
    reason: str | None = None
    error: Exception | None = None

    def available(self) -> str | None:
        return self.reason

    def prepare(self, model: Any, inputs: Mapping[str, Tensor], workdir: Path) -> Callable[[], object]:
        if self.error is not None:
            raise self.error
        (workdir / "prepared").touch()
        return lambda: sum(range(10_000 if workdir.name == "dense" else 10))

    def peak_bytes(self, call: Callable[[], object]) -> int | None:
        return 7
