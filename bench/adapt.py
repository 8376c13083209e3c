"""``modpass study adapt``: a pretrained model, routed without training and tuned briefly, beside dropping layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modpass.bench.adapt_report import adapt_markdown, save_adapt_plot, verdict
from modpass.bench.adapt_result import AdaptResult
from modpass.bench.adapt_run import Bench
from modpass.bench.adapt_setup import Progress, Run, Subject, smollm2
from modpass.bench.adapt_tune import gated, tune
from modpass.bench.adapt_variant import Variant, applied, chosen, operations
from modpass.errors import StateError, require
from modpass.files import whole_file

__all__ = ["FULL", "QUICK", "AdaptPlan", "adapt"]


@dataclass(frozen=True)
class AdaptPlan:
    """The variants, and how each is made and measured."""

    variants: tuple[Variant, ...]
    run: Run


def _level(layers: int, routed: Sequence[tuple[str, float]]) -> tuple[Variant, ...]:
    """What is compared at the operations of the model without so many layers."""
    return (
        Variant(f"drop-{layers}", layers, "drop"),
        Variant(f"spaced-{layers}", layers, "spaced"),
        Variant(f"drop-mlp-{layers}", layers, "drop", "mlp"),
        *(Variant(f"route-{p}-{c:g}-{layers}", layers, "route", p, c) for p, c in routed),  # type: ignore[arg-type]
    )


def _tuned(layers: int, capacity: float) -> tuple[Variant, ...]:
    routed = [
        Variant(f"route-block-{capacity:g}-{layers}-{t}", layers, "route", "block", capacity, t)
        for t in ("routers", "lora", "distil")
    ]
    return (*routed, Variant(f"drop-{layers}-distil", layers, "drop", tune="distil"))


DENSE = Variant("dense")
_ROUTED = (("block", 0.33), ("mlp", 0.5))
FULL = AdaptPlan(
    (
        DENSE,
        *_level(4, (*_ROUTED, ("block", 0.2), ("block", 0.5))),
        *_level(2, _ROUTED),
        *_level(6, _ROUTED),
        *_tuned(4, 0.33),
    ),
    Run(),
)
QUICK = AdaptPlan(
    (DENSE, *_level(4, _ROUTED), *_tuned(4, 0.33)[:1]),
    Run(sequence=64, calibration_rows=1, held_out_rows=2, steps=2, tuning_rows=1, tuning_sequence=64),
)


def adapt(
    folder: Path,
    plan: AdaptPlan = FULL,
    tell: Progress = lambda *_: None,
    subject: Subject | None = None,
) -> list[AdaptResult]:
    """Measure every variant of the plan, and write ``adapt.json``, ``.md`` and ``.png`` into ``folder``.

    Each variant is kept there when it is done, as is each calibration; called again, it goes on with the next.

    Raises:
        StateError: the folder holds variants of another plan.
        MissingExtraError: the weights, a text, matplotlib or peft is not installed.
    """
    require("matplotlib.figure", "bench")
    if any(v.tune in ("lora", "distil") for v in plan.variants):
        require("peft", "train")  # now, not when everything else is done
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(subject or smollm2(), plan.run, folder, tell)
    results = [_kept(bench, variant) for variant in plan.variants]
    record = {**bench.settings(), "results": [asdict(r) for r in results], "verdict": verdict(results)}
    with whole_file(folder / "adapt.json") as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n")
    with whole_file(folder / "adapt.md") as temporary:
        temporary.write_text(adapt_markdown(results))
    with whole_file(folder / "adapt.png") as temporary:
        save_adapt_plot(results, temporary)
    return results


def _kept(bench: Bench, variant: Variant) -> AdaptResult:
    path = bench.folder / f"{variant.name}.json"
    settings: dict[str, Any] = {**bench.settings(), "variant": asdict(variant)}
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["settings"] != settings:
            raise StateError(f"'{path}' is of a run with other settings; give another folder, or remove it")
        return AdaptResult(**found["result"])
    result = _measured(bench, variant)
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps({"settings": settings, "result": asdict(result)}, indent=2) + "\n")
    return result


def _measured(bench: Bench, variant: Variant) -> AdaptResult:
    plain, ids = bench.model(variant.parts), bench.example()
    dense = operations(plain, DENSE, [], ids)
    blocks = list(bench.model("block").routed_blocks)
    dropped = Variant("", variant.layers, "drop")
    # Every layer counts as much as the first: those of a language model are alike.
    budget = operations(bench.model("block"), dropped, blocks[: variant.layers], ids)
    costs: dict[str, float] = {}
    if variant.how in ("drop", "route"):
        found = bench.costs(variant.parts)
        costs = found.dropped if variant.how == "drop" else found.routed
    names = chosen(plain, variant, costs, budget, ids)
    model, own = bench.ready(variant, names)
    learns = gated(model, own, bench.run.mix) if variant.tune and variant.how == "route" else nullcontext()
    with applied(model, variant, own), learns:
        if variant.tune:
            teacher = bench.model(variant.parts)
            tune(model, variant.tune, bench.run, bench.texts, teacher, lambda *n: bench.tell(variant.name, *n))
        losses = bench.losses(model, variant.name)
    return AdaptResult(asdict(variant), names, operations(plain, variant, names, ids) / dense, losses)
