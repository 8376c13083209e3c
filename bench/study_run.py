"""One training run of a study, to a budget of operations; goes on after an interruption as if there had been none."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modpass import RoutedModel, mod_transform, trace
from modpass.bench.flops import count_flops
from modpass.bench.study_model import StudyDecoder
from modpass.bench.study_text import Corpus
from modpass.bench.timing import Timing
from modpass.errors import StateError
from modpass.files import whole_file
from modpass.training import routing_losses, routing_stats

__all__ = ["Run", "RunResult", "Setup", "train"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Setup:
    """What is trained. every: route each so-manyeth block (0: none), at ``capacity``, by ``selection``."""

    name: str
    width: int
    layers: int = 6
    every: int = 0
    capacity: float = 0.125
    selection: str = "expert_choice"

    def model(self, ids: Tensor, seed: int) -> RoutedModel:
        """The traced model; its dense weights depend on the seed and its size alone."""
        torch.manual_seed(seed)
        dense = StudyDecoder(self.width, self.layers)
        if not self.every:
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
    """How each setup is trained: ``flops`` operations, forward and backward (three forwards) together."""

    flops: float
    rows: int = 16
    sequence: int = 256
    rate: float = 3e-3  # at width 128; other widths by its inverse square root
    validation_rows: int = 64
    points: int = 12
    seed: int = 0


@dataclass
class RunResult:
    """curve: operations, validation loss; step_s: median seconds of a step; loss, causal: at the end, selecting as
    in training and causally; accuracy: of the causal decision, the worst block.
    """

    setup: dict[str, Any]
    parameters: int
    flops_per_step: int
    steps: int
    step_s: float = 0.0
    curve: list[tuple[float, float]] = field(default_factory=list)
    loss: float = float("nan")
    causal: float | None = None
    accuracy: float | None = None


def train(setup: Setup, run: Run, corpus: Corpus, folder: Path, tell: Progress) -> RunResult:
    """Train to the end and return the result, from ``folder`` where an earlier call got so far.

    Raises:
        StateError: the folder holds a run of other settings.
    """
    finished, midway = folder / f"{setup.name}.json", folder / f"{setup.name}.pt"
    settings = {"setup": asdict(setup), "run": asdict(run)}
    if finished.exists():
        found = json.loads(finished.read_text(encoding="utf-8"))
        _same(found["settings"], settings, finished)
        return RunResult(**found["result"])
    result = _Training(setup, run, corpus).to_the_end(midway, settings, tell)
    with whole_file(finished) as temporary:
        temporary.write_text(json.dumps({"settings": settings, "result": asdict(result)}, indent=2) + "\n")
    midway.unlink(missing_ok=True)
    return result


def _same(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    if found != wanted:
        raise StateError(f"'{path}' is of a run with other settings; give another folder, or remove it")


class _Training:
    def __init__(self, setup: Setup, run: Run, corpus: Corpus) -> None:
        self.run, self.corpus, self.routed = run, corpus, bool(setup.every)
        self.held_out = corpus.validation(run.validation_rows, run.sequence)
        self.model = setup.model(self.held_out[:2], run.seed)
        batch = torch.zeros(run.rows, run.sequence, dtype=torch.int64)
        cost = 3 * count_flops(self.model, {"ids": batch}).total
        self.draws = torch.Generator().manual_seed(run.seed)
        rate = run.rate * (128 / setup.width) ** 0.5
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
        steps = max(1, round(run.flops / cost))
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, rate, total_steps=steps, pct_start=0.1)
        count = sum(p.numel() for p in self.model.parameters())
        self.result = RunResult(asdict(setup), count, cost, steps)
        self.seconds: list[float] = []
        self.step = 0

    def to_the_end(self, midway: Path, settings: dict[str, Any], tell: Progress) -> RunResult:
        """Train; keep the state at each point of the curve."""
        if midway.exists():
            self._load(torch.load(midway, weights_only=True), settings, midway)
        name, steps = settings["setup"]["name"], self.result.steps
        every = max(1, steps // self.run.points)
        while self.step < steps:
            self._train_step()
            if self.step % every == 0 or self.step == steps:
                self.result.curve.append((float(self.step * self.result.flops_per_step), self._validate()))
                with whole_file(midway) as temporary:
                    torch.save(self._state(settings), temporary)
            tell(name, self.step, steps)
        self._conclude()
        return self.result

    def _train_step(self) -> None:
        start = time.perf_counter()
        self.model.train()
        ids = self.corpus.batch(self.run.rows, self.run.sequence, self.draws)
        loss = _loss(self.model, ids)
        if self.routed:
            loss = loss + routing_losses(self.model).total
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        self.step += 1

    @torch.no_grad()
    def _validate(self) -> float:
        self.model.eval()
        parts = self.held_out.split(self.run.rows)
        return sum(float(_loss(self.model, p)) * len(p) for p in parts) / len(self.held_out)

    @torch.no_grad()
    def _conclude(self) -> None:
        result = self.result
        result.loss = result.curve[-1][1]
        result.step_s = Timing(tuple(self.seconds)).median
        if result.setup["selection"] == "expert_choice" and self.routed:
            self.model.use_causal()
            result.causal = self._validate()
            self.model(self.held_out)
            result.accuracy = min(s.accuracy for s in routing_stats(self.model).values())

    def _state(self, settings: dict[str, Any]) -> dict[str, Any]:
        noise = [b.generator.get_state() for b in self.model.routed_blocks.values() if b.generator is not None]
        return {
            "settings": settings,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "draws": self.draws.get_state(),
            "noise": noise[:1],
            "curve": [list(p) for p in self.result.curve],
            "seconds": self.seconds,
            "step": self.step,
        }

    def _load(self, state: dict[str, Any], settings: dict[str, Any], path: Path) -> None:
        _same(state["settings"], settings, path)
        for part, own in (("model", self.model), ("optimizer", self.optimizer), ("schedule", self.schedule)):
            own.load_state_dict(state[part])
        self.draws.set_state(state["draws"])
        for noise in state["noise"]:
            self.model.seed(torch.Generator().set_state(noise))
        self.result.curve = [(flops, loss) for flops, loss in state["curve"]]
        self.seconds, self.step = state["seconds"], state["step"]


def _loss(model: torch.nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
