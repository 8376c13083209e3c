"""The slow reference of one routed branch: ``x + r * branch(norm(x))`` at the chosen tokens, ``x`` at the others.

The branch is a submodule (attention or MLP) whose output the block adds to its residual; the residual is what enters
the norm before it. Shares no code with the pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from modpass.reference import Setting, hidden_keys, reference_choice


@contextmanager
def branch_reference(
    model: nn.Module, branches: dict[str, tuple[str, str]], settings: dict[str, Setting], keep: Tensor | None = None
) -> Iterator[nn.Module]:
    """Inside, ``model`` routes the branches: block name -> (path of the norm, path of the branch)."""
    with ExitStack() as stack:
        for name, (norm, branch) in branches.items():
            residual: dict[str, Tensor] = {}

            def note(_: nn.Module, args: tuple[Tensor, ...], residual: dict[str, Tensor] = residual) -> None:
                residual["x"] = args[0]

            stack.callback(model.get_submodule(norm).register_forward_pre_hook(note).remove)
            module = model.get_submodule(branch)
            forward = _routed(module.forward, settings[name], residual, keep)
            stack.enter_context(mock.patch.object(module, "forward", forward))
        yield model


def _routed(dense: Any, setting: Setting, residual: dict[str, Tensor], keep: Tensor | None) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        x_BSD = residual["x"]
        scores = [[float((token.float() * setting.weight).sum()) for token in row] for row in x_BSD]
        chosen = [
            reference_choice(row, setting.capacity, None if keep is None else [bool(v) for v in keep[b]])
            for b, row in enumerate(scores)
        ]
        with hidden_keys(chosen, x_BSD.shape[1]):
            output = dense(*args, **kwargs)
        y_BSD = output[0] if isinstance(output, tuple) else output
        factors = torch.zeros(y_BSD.shape[:2])
        for b, positions in enumerate(chosen):
            for i in positions:
                factors[b, i] = _gate(setting.gate, scores[b][i])
        routed = y_BSD * factors[:, :, None]
        routed = torch.where(factors[:, :, None] == 0, torch.zeros(()), routed)  # a token that saw nothing is NaN
        return (routed, *output[1:]) if isinstance(output, tuple) else routed

    return forward


def _gate(gate: str, score: float) -> float:
    if gate == "unit":
        return 1.0
    return score if gate == "linear" else 1 / (1 + math.exp(-score))
