"""Running commands in a test: models for them, and what they print."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modpass.cli import main
from modpass.errors import ModpassError
from tests.bench_decoder import Decoder
from tests.test_alone import Windowed, example, stack
from tests.zoo import make

DECODER = "tests.bench_decoder:decoder"
ROOT = Path(__file__).parents[1]
Capture = pytest.CaptureFixture[str]

# Factories that the commands are given


class RunningSum(nn.Module):
    """A block that mixes tokens in a way that no choice of tokens follows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).cumsum(1)


def mixed() -> tuple[nn.Module, dict[str, Tensor]]:
    model = Decoder().eval()
    model.layers = nn.ModuleList([model.layers[0], RunningSum(), model.layers[1], RunningSum()])
    return model, {"input_ids": torch.arange(22).view(2, 11)}


def biased() -> tuple[nn.Module, dict[str, Tensor]]:
    return make("alibi"), {"ids": torch.arange(22).view(2, 11)}


def broken() -> nn.Module:
    raise ZeroDivisionError("no such\nnumber")


def windowed() -> tuple[nn.Module, tuple[Tensor]]:
    return stack(Windowed), example()


def interrupted() -> nn.Module:
    raise KeyboardInterrupt


def refused() -> nn.Module:
    raise ModpassError("the sentence")


def sleepy() -> nn.Module:
    print("ready", flush=True)
    time.sleep(60)
    raise AssertionError


def run(capsys: Capture, *arguments: Any, code: int = 0) -> tuple[str, str]:
    """Run a command in this process; its output and error stream."""
    capsys.readouterr()
    found = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert found == code, err
    return out, err


def rows(table: str, start: str) -> list[list[str]]:
    """The cells of those rows of a printed table that begin so."""
    lines = [line.strip("│ ") for line in table.splitlines()]
    return [[cell.strip() for cell in line.split("│")] for line in lines if line.startswith(start)]


def fails(capsys: Capture, code: int, *arguments: Any) -> str:
    """The one line that a failing command prints on the error stream."""
    out, err = run(capsys, *arguments, code=code)
    assert out == ""
    assert err.startswith("modpass: ")
    assert err.count("\n") == 1, err
    return err
