"""One model, its calibrations and its texts: what every variant of a study is measured with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modpass import RoutedModel, mod_transform
from modpass.bench.adapt_pick import cost_alone, fitted, pick_record, picked_from, picked_together
from modpass.bench.adapt_setup import Progress, Run, Subject, next_token_loss
from modpass.bench.adapt_text import Text
from modpass.bench.adapt_variant import Variant, cheapest, operations, spaced
from modpass.bench.study_kept import kept
from modpass.errors import require
from modpass.training import Picked

__all__ = ["Bench"]


class Bench:
    """Makes models and calibrations when they are first asked for; calibrations are kept in ``folder``."""

    def __init__(self, subject: Subject, run: Run, folder: Path, tell: Progress) -> None:
        self.subject, self.run, self.folder, self.tell = subject, run, folder, tell
        self._models: dict[tuple[str, bool], RoutedModel] = {}
        self._adapters: dict[str, dict[str, Tensor]] = {}  # as they were before any tuning
        self._routers: dict[str, dict[str, Tensor]] = {}

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

    def routers(self, parts: str) -> dict[str, Tensor]:
        """The fitted router of each block."""
        if parts not in self._routers:
            model = self.model(parts)
            self._routers[parts] = self._kept(f"routers-{parts}.pt", lambda: fitted(model, self.texts, self.run))
        return self._routers[parts]

    def capacities(self, variant: Variant) -> dict[str, float]:
        """The blocks of a variant, and at which capacity; 0: dropped."""
        model, blocks, ids = self.model(variant.parts), list(self.model("block").routed_blocks), self.example()
        if variant.how == "dense":
            return {}
        if variant.how == "spaced":
            return spaced(blocks, variant.layers)
        # Every layer counts as much as the first: those of a language model are alike.
        budget = operations(self.model("block"), dict.fromkeys(blocks[: variant.layers], 0.0), ids)
        if variant.together:
            share = budget / operations(model, {}, ids)
            return self._together(variant).capacities(share)
        return cheapest(model, self._capacity(variant), self._alone(variant), budget, ids)

    def _together(self, variant: Variant) -> Picked:
        """The steps to the smallest budget of the study, of which every level takes the beginning."""
        model, routed = self.with_routers(variant), variant.how == "route"
        blocks, ids = list(model.routed_blocks), self.example()
        least = operations(model, dict.fromkeys(blocks[: self.run.most_layers], 0.0), ids) / operations(model, {}, ids)
        what = f"{variant.how}-{variant.parts}-together"
        levels = (*self.run.capacities, 0.0) if routed else (0.0,)

        def search() -> dict[str, Any]:
            return pick_record(picked_together(model, self.texts, self.run, levels, least, self._told(what)))

        steps = self._kept(f"{what}.json", search)
        return picked_from(steps)

    def _alone(self, variant: Variant) -> dict[str, float]:
        model, capacity = self.with_routers(variant), self._capacity(variant)
        what = f"{variant.how}-{variant.parts}-alone-{capacity:g}"
        told = self._told(what)
        return self._kept(f"{what}.json", lambda: cost_alone(model, self.texts, self.run, capacity, told))

    def _capacity(self, variant: Variant) -> float:
        return variant.capacity if variant.how == "route" else 0.0

    def _told(self, what: str) -> Callable[[int, int], None]:
        return lambda done, expected: self.tell(what, done, expected)

    def _kept(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return kept(self.folder / name, self.settings(), make)

    def with_routers(self, variant: Variant) -> RoutedModel:
        """The model without LoRA; where the variant routes, its routers are the fitted ones."""
        model = self.model(variant.parts)
        if variant.how == "route":
            for name, weight in self.routers(variant.parts).items():
                model.routed_blocks[name].router.weight.data.copy_(weight)
        return model

    def ready(self, variant: Variant, capacities: Mapping[str, float]) -> tuple[RoutedModel, dict[str, float]]:
        """The model that a variant runs on, as it was before tuning, and the capacities by the blocks' names there."""
        lora = variant.tune in ("lora", "distil")
        model = self.model(variant.parts, lora) if lora else self.with_routers(variant)
        own = {n: next(o for o in model.routed_blocks if f".{o}".endswith(f".{n}")) for n in capacities}
        if lora:
            model.load_state_dict(self._adapters[variant.parts], strict=False)
        if lora and variant.how == "route":
            for name, path in own.items():
                model.routed_blocks[path].router.weight.data.copy_(self.routers(variant.parts)[name])
        return model, {own[n]: c for n, c in capacities.items()}

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
