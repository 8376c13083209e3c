"""PyTorch itself, eager or compiled, on a CPU or a GPU."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modpass import RoutedModel
from modpass.bench.hardware import no_gpu
from modpass.bench.memory import resident_growth, torch_device_growth

__all__ = ["Call", "TorchRunner"]

Call = Callable[[], object]


@dataclass(frozen=True)
class TorchRunner:
    """PyTorch; ``compiled`` by ``torch.compile`` with its default backend for static shapes."""

    name: str
    device: str = "cpu"
    compiled: bool = False

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
            module = torch.compile(module, dynamic=False)

        def call() -> object:
            with torch.no_grad():
                return module(**placed)

        call()
        return call

    def peak_bytes(self, call: Call) -> int | None:
        """What a call allocates on the device."""
        return resident_growth(call) if self.device == "cpu" else torch_device_growth(call)


def _no_compiler() -> str | None:
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    if any(map(shutil.which, compilers)):
        return None
    return f"torch.compile needs a C++ compiler; there is no {' or '.join(compilers)}"
