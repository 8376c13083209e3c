"""The training loop of a study, which keeps all that it needs to go on after an interruption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modpass.bench.flops import count_flops
from modpass.bench.study_kept import same_settings
from modpass.bench.study_setup import Run, RunResult, Setup
from modpass.bench.study_text import Corpus
from modpass.files import whole_file
from modpass.training import routing_losses, routing_stats, skipped

__all__ = ["Progress", "Training"]

# By itself a token does not know how many others go through: with exactly k slots the last tokens of some rows find
# them taken. A cache that is made for a sequence of this many times the length has them to spare.
SLACK = 1.25

Progress = Callable[[str, int, int], None]


class Training:
    """A model, its optimizer and where they are; the same from the same settings."""

    def __init__(self, setup: Setup, run: Run, corpus: Corpus) -> None:
        self.run, self.corpus = run, corpus
        self.held_out = corpus.validation(run.validation_rows, run.sequence)
        seed = run.seed + setup.seed
        self.model = setup.model(self.held_out[:2], seed)
        self.routed = bool(self.model.routed_blocks)
        batch = torch.zeros(run.rows, run.sequence, dtype=torch.int64)
        cost = 3 * count_flops(self.model, {"ids": batch}).total
        self.draws = torch.Generator().manual_seed(seed)
        rate = run.rate * (128 / setup.width) ** 0.5
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
        steps = max(1, round(run.flops / cost)) if run.steps is None else run.steps
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, rate, total_steps=steps, pct_start=0.1)
        count = sum(p.numel() for p in self.model.parameters())
        self.result = RunResult(asdict(setup), count, cost, steps)
        self.step = 0

    def to_the_end(self, midway: Path, settings: dict[str, Any], tell: Progress) -> RunResult:
        """Train; keep the state at each point of the curve."""
        if midway.exists():
            self._load(torch.load(midway, weights_only=True), settings, midway)
        name, steps = settings["setup"]["name"], self.result.steps
        every = max(1, steps // self.run.points)
        while self.step < steps:
            self.learn()
            self.schedule.step()
            self.step += 1
            if self.step % every == 0 or self.step == steps:
                self.result.curve.append((float(self.step * self.result.flops_per_step), self._validate()))
                with whole_file(midway) as temporary:
                    torch.save(self._state(settings), temporary)
            tell(name, self.step, steps)
        self._conclude()
        return self.result

    def learn(self) -> None:
        """Change the weights by one batch."""
        self.model.train()
        ids = self.corpus.batch(self.run.rows, self.run.sequence, self.draws)
        loss = _loss(self.model, ids)
        if self.routed:
            loss = loss + routing_losses(self.model, router=self.run.router).total
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def _validate(self) -> float:
        self.model.eval()
        parts = self.held_out.split(self.run.rows)
        return sum(float(_loss(self.model, p)) * len(p) for p in parts) / len(self.held_out)

    @torch.no_grad()
    def _conclude(self) -> None:
        result = self.result
        result.loss = result.curve[-1][1]
        result.otherwise = self._otherwise() if self.routed else {}
        if result.setup["selection"] == "expert_choice" and self.routed:
            self.model.use_causal()
            result.causal_tight = self._validate()
            self.model(self.held_out)
            result.accuracy = min(s.accuracy for s in routing_stats(self.model).values())
            for block in self.model.routed_blocks.values():
                block.max_sequence = round(SLACK * self.run.sequence)
            result.causal = self._validate()

    def _otherwise(self) -> dict[str, float]:
        """What the trained model loses with another selection, and without its routed blocks."""
        trained, blocks = self.result.setup["selection"], self.model.routed_blocks
        other = "expert_choice" if trained == "stochastic" else "stochastic"
        self.model.seed(torch.Generator().manual_seed(self.run.seed))
        for block in blocks.values():
            block.selection = other
        found = {other: self._validate()}
        for block in blocks.values():
            block.selection = trained
        with skipped(self.model, list(blocks)):
            return {**found, "none": self._validate()}

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
            "step": self.step,
        }

    def _load(self, state: dict[str, Any], settings: dict[str, Any], path: Path) -> None:
        same_settings(state["settings"], settings, path)
        for part, own in (("model", self.model), ("optimizer", self.optimizer), ("schedule", self.schedule)):
            own.load_state_dict(state[part])
        self.draws.set_state(state["draws"])
        for noise in state["noise"]:
            self.model.seed(torch.Generator().set_state(noise))
        self.result.curve = [(flops, loss) for flops, loss in state["curve"]]
        self.step = state["step"]


def _loss(model: torch.nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
