"""PyTorch itself, eager or compiled, on a CPU or a GPU."""

from __future__ import annotations

import copy
import os
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx

from modpass import RoutedModel
from modpass.bench.flops import paths_of
from modpass.bench.hardware import no_gpu
from modpass.bench.measuring import Call
from modpass.bench.memory import resident_growth, torch_device_growth

__all__ = ["TorchRunner"]

_PROFILED = 3  # calls, of which the median is kept


@dataclass(frozen=True)
class TorchRunner:
    """PyTorch; ``compiled`` by ``torch.compile`` with its default backend for static shapes.

    graphs: let it capture what it compiled as CUDA graphs (its mode "reduce-overhead").
    """

    name: str
    device: str = "cpu"
    compiled: bool = False
    graphs: bool = False

    def available(self) -> str | None:
        """A CPU is always there; compiling for it needs a C++ compiler."""
        if self.device == "cuda":
            return no_gpu()
        return _no_compiler() if self.compiled else None

    def prepare(self, model: RoutedModel, inputs: Mapping[str, Tensor], workdir: Path) -> Call:
        """Place the model (a copy, if it moves) and call it once, which compiles it and fills torch's caches.

        >>> from modpass import trace
        >>> model = trace(torch.nn.ReLU(), torch.zeros(2, 1))
        >>> TorchRunner("torch").prepare(model, {"input": torch.ones(2, 1)}, Path())().tolist()
        [[1.0], [1.0]]
        """
        module: Any = model if self.device == "cpu" else copy.deepcopy(model).to(self.device)
        placed = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        if self.compiled:
            module = torch.compile(module, dynamic=False, mode="reduce-overhead" if self.graphs else None)

        def call() -> object:
            with torch.no_grad():
                return module(**placed)

        call()
        return call

    def peak_bytes(self, call: Call) -> int | None:
        """What a call allocates on the device."""
        return resident_growth(call) if self.device == "cpu" else torch_device_growth(call)

    def block_seconds(
        self, model: RoutedModel, inputs: Mapping[str, Tensor], workdir: Path, blocks: Collection[str]
    ) -> Mapping[str, float]:
        """Seconds of one eager call in each block, operator by operator; nothing where operators are fused.

        >>> from modpass.decode.example import tiny_decoder
        >>> ids = {"ids": torch.zeros(1, 4, dtype=torch.int64)}
        >>> sorted(TorchRunner("torch").block_seconds(tiny_decoder(), ids, Path(), ["blocks.0", "blocks.1"]))
        ['', 'blocks.0', 'blocks.1']
        """
        if self.compiled or self.device != "cpu":
            return {}
        timers = [_BlockTimer(model, blocks) for _ in range(_PROFILED)]
        with torch.no_grad():
            for timer in timers:
                timer.run(*model.info.call.bind(inputs))
        return {name: median(timer.seconds[name] for timer in timers) for name in timers[0].seconds}


class _BlockTimer(fx.Interpreter):
    """Runs a graph and books each node's seconds on the block that the node is of, or on ``""``."""

    def __init__(self, model: RoutedModel, blocks: Collection[str]) -> None:
        super().__init__(model)
        self.blocks = frozenset(blocks)
        self.seconds: dict[str, float] = dict.fromkeys([*blocks, ""], 0.0)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        start = time.perf_counter()
        result = super().run_node(n)
        self.seconds[next(iter(paths_of(n) & self.blocks), "")] += time.perf_counter() - start
        return result


def _no_compiler() -> str | None:
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    if any(map(shutil.which, compilers)):
        return None
    return f"torch.compile needs a C++ compiler; there is no {' or '.join(compilers)}"
