"""One model, its calibrations and its texts: what every variant of a study is measured with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modpass import RoutedModel, mod_transform
from modpass.bench.adapt_setup import Costs, Progress, Run, Subject, next_token_loss
from modpass.bench.adapt_text import Text
from modpass.bench.adapt_variant import Variant
from modpass.errors import StateError, require
from modpass.files import whole_file
from modpass.training import block_costs, calibrate, skipped

__all__ = ["Bench"]


class Bench:
    """Makes models and calibrations when they are first asked for; calibrations are kept in ``folder``."""

    def __init__(self, subject: Subject, run: Run, folder: Path, tell: Progress) -> None:
        self.subject, self.run, self.folder, self.tell = subject, run, folder, tell
        self._models: dict[tuple[str, bool], RoutedModel] = {}
        self._adapters: dict[str, dict[str, Tensor]] = {}  # as they were before any tuning
        self._costs: dict[str, Costs] = {}

    @cached_property
    def texts(self) -> tuple[Text, ...]:
        """The texts, as tokens."""
        return tuple(self.subject.texts())

    @cached_property
    def dense(self) -> nn.Module:
        """The model itself, whose weights all that is traced of it shares."""
        return self.subject.model().eval()

    def settings(self) -> dict[str, Any]:
        """What a result depends on beside its variant."""
        texts = {t.name: t.sha256 for t in self.texts}
        return {"subject": self.subject.name, "run": asdict(self.run), "texts": texts}

    def example(self) -> Tensor:
        """Rows to trace and to count operations with."""
        return self.texts[0].rows(2, self.run.sequence)

    def model(self, parts: str, lora: bool = False) -> RoutedModel:
        """The traced model, every block routable and set to take all tokens as the dense model does."""
        if (parts, lora) not in self._models:
            self.tell("trace", 0, 0)
            dense = self._with_lora() if lora else self.dense
            options: dict[str, Any] = {"every": 1, "gate": "unit", "parts": parts}
            routed = mod_transform(dense, 1.0, example_inputs={"input_ids": self.example()}, **options)
            self._models[parts, lora] = routed.eval()
            if lora:
                self._adapters[parts] = {n: p.detach().clone() for n, p in routed.named_parameters() if "lora_" in n}
        return self._models[parts, lora]

    def _with_lora(self) -> nn.Module:
        peft = require("peft", "train")
        torch.manual_seed(self.run.seed)
        config = peft.LoraConfig(r=self.run.rank, lora_alpha=2 * self.run.rank, target_modules="all-linear")
        adapted: nn.Module = peft.get_peft_model(self.subject.model(), config)
        return adapted.eval()

    def costs(self, parts: str) -> Costs:
        """What blocks cost, and their routers."""
        if parts not in self._costs:
            path, settings = self.folder / f"calibration-{parts}.pt", self.settings()
            if not path.exists():
                kept = {"settings": settings, "costs": asdict(self._calibrated(parts))}
                with whole_file(path) as temporary:
                    torch.save(kept, temporary)
            kept = torch.load(path, weights_only=True)
            if kept["settings"] != settings:
                raise StateError(f"'{path}' is of a run with other settings; give another folder, or remove it")
            self._costs[parts] = Costs(**kept["costs"])
        return self._costs[parts]

    def _calibrated(self, parts: str) -> Costs:
        model, done = self.model(parts), 0
        count = self.run.calibration_rows + self.run.compared_rows
        rows = [t.rows(count, self.run.sequence) for t in self.texts]
        batches = [b for r in rows for b in r[self.run.compared_rows :].split(self.run.batch)]
        compared = [torch.cat([r[: self.run.compared_rows] for r in rows])]
        total = 2 * (1 + len(model.routed_blocks))

        def loss(output: Any, ids: Tensor) -> Tensor:
            nonlocal done
            done += 1
            self.tell(f"calibrate, {parts}", done, total)
            return next_token_loss(output, ids)

        for block in model.routed_blocks.values():
            block.capacity = self.run.capacity
        routed = {n: b.lost for n, b in calibrate(model, batches, loss=loss, held_out=compared).blocks.items()}
        dropped = block_costs(model, compared, loss, lambda name: skipped(model, [name]))
        routers = {n: b.router.weight.detach().clone() for n, b in model.routed_blocks.items()}
        for block in model.routed_blocks.values():
            block.capacity = 1.0
        return Costs(routed, dropped, routers)

    def ready(self, variant: Variant, names: Sequence[str]) -> tuple[RoutedModel, list[str]]:
        """The model that a variant runs on, as it was before tuning, and the names of its blocks there."""
        lora = variant.tune in ("lora", "distil")
        model = self.model(variant.parts, lora)
        if lora:
            model.load_state_dict(self._adapters[variant.parts], strict=False)
        own = {n: next(o for o in model.routed_blocks if f".{o}".endswith(f".{n}")) for n in names}
        if variant.how == "route":
            for name, path in own.items():
                weight = model.routed_blocks[path].router.weight
                weight.data.copy_(self.costs(variant.parts).routers[name])
        return model, list(own.values())

    @torch.no_grad()
    def losses(self, model: nn.Module, what: str) -> dict[str, float]:
        """Held-out nats per token of each text."""
        found: dict[str, float] = {}
        for i, text in enumerate(self.texts):
            rows = text.rows(self.run.held_out_rows, self.run.sequence, held_out=True)
            parts = rows.split(self.run.batch)
            found[text.name] = 0.0
            for j, ids in enumerate(parts):
                self.tell(what, i * len(parts) + j, len(self.texts) * len(parts))
                found[text.name] += float(next_token_loss(model(input_ids=ids), ids)) * len(ids) / len(rows)
        return found
