"""What a study trains: the model, the budget, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from modpass import RoutedModel, mod_transform, trace
from modpass.bench.study_model import StudyDecoder

__all__ = ["Run", "RunResult", "Setup"]


@dataclass(frozen=True)
class Setup:
    """What is trained. every: route each so-manyeth block (0: none), at ``capacity``, by ``selection``.

    With the selection "none" those blocks are left out instead: what is left of the model when routing brings nothing.
    seed: added to that of the run, for the same once more with other weights and draws.
    """

    name: str
    width: int
    layers: int = 6
    every: int = 0
    capacity: float = 0.125
    selection: str = "expert_choice"
    seed: int = 0

    def model(self, ids: Tensor, seed: int) -> RoutedModel:
        """The traced model; its dense weights depend on the seed and its size alone."""
        torch.manual_seed(seed)
        dense = StudyDecoder(self.width, self.layers)
        if self.every and self.selection == "none":
            dense.blocks = nn.ModuleList(b for i, b in enumerate(dense.blocks, 1) if i % self.every)
        if not self.every or self.selection == "none":
            return trace(dense, (ids,))
        routed = mod_transform(
            dense,
            self.capacity,
            every=self.every,
            selection=self.selection,  # type: ignore[arg-type]
            predictor=self.selection == "expert_choice",
            example_inputs=(ids,),
        )
        return routed.seed(torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Run:
    """How each setup is trained: ``flops`` operations, forward and backward (three forwards) together.

    steps: so many instead, whatever they cost.
    """

    flops: float
    rows: int = 16
    sequence: int = 256
    rate: float = 3e-3  # at width 128; other widths by its inverse square root
    validation_rows: int = 64
    points: int = 12
    seed: int = 0
    router: float = 0.1  # weight of the routers' own loss, which makes their scores part from each other
    steps: int | None = None


@dataclass
class RunResult:
    """step_s: median seconds of a step, all runs' steps in turn; curve: operations, validation loss; loss: at the end,
    selecting as in training; causal, causal_tight: each token deciding by itself, with a quarter more slots than
    top-k and with just as many; accuracy: of the causal decision, the worst block; otherwise: the loss when the trained
    model is run with another selection ("stochastic" or "expert_choice"), or without its routed blocks ("none").
    """

    setup: dict[str, Any]
    parameters: int
    flops_per_step: int
    steps: int
    step_s: float = 0.0
    curve: list[tuple[float, float]] = field(default_factory=list)
    loss: float = float("nan")
    causal: float | None = None
    causal_tight: float | None = None
    accuracy: float | None = None
    otherwise: dict[str, float] = field(default_factory=dict)
