"""``modpass study adapt``: a pretrained model, routed without training and tuned briefly, beside dropping layers."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from modpass.bench.adapt_report import adapt_markdown, save_adapt_plot, verdict
from modpass.bench.adapt_result import AdaptResult
from modpass.bench.adapt_run import Bench
from modpass.bench.adapt_setup import Progress, Run, Subject, smollm2
from modpass.bench.adapt_tune import gated, tune
from modpass.bench.adapt_variant import Variant, applied, operations
from modpass.bench.study_kept import kept
from modpass.errors import require
from modpass.files import whole_file

__all__ = ["FULL", "QUICK", "AdaptPlan", "adapt"]


@dataclass(frozen=True)
class AdaptPlan:
    """The variants, and how each is made and measured."""

    variants: tuple[Variant, ...]
    run: Run


def _level(layers: int) -> tuple[Variant, ...]:
    """What is compared at the operations of the model without so many layers."""
    return (
        Variant(f"drop-{layers}", layers, "drop"),
        Variant(f"route-{layers}", layers, "route"),
        Variant(f"drop-alone-{layers}", layers, "drop", together=False),
        Variant(f"route-alone-{layers}", layers, "route", together=False, capacity=0.33),
        Variant(f"spaced-{layers}", layers, "spaced"),
    )


def _tuned(layers: int) -> tuple[Variant, ...]:
    routed = [Variant(f"route-{layers}-{t}", layers, "route", tune=t) for t in ("routers", "lora", "distil")]
    return (*routed, Variant(f"drop-{layers}-distil", layers, "drop", tune="distil"))


DENSE = Variant("dense")
FULL = AdaptPlan((DENSE, *_level(2), *_level(4), *_level(6), *_tuned(4)), Run())
QUICK = AdaptPlan(
    (DENSE, *_level(2), *_tuned(2)[:1]),
    Run(
        sequence=64,
        calibration_rows=1,
        compared_rows=1,
        held_out_rows=2,
        most_layers=2,
        capacities=(0.25,),
        steps=2,
        tuning_rows=1,
        tuning_sequence=64,
    ),
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
    settings = {**bench.settings(), "variant": asdict(variant)}
    return AdaptResult(
        **kept(bench.folder / f"{variant.name}.json", settings, lambda: asdict(_measured(bench, variant)))
    )


def _measured(bench: Bench, variant: Variant) -> AdaptResult:
    plain, ids, capacities = bench.model(variant.parts), bench.example(), bench.capacities(variant)
    share = operations(plain, capacities, ids) / operations(plain, {}, ids)
    model, own = bench.ready(variant, capacities)
    learns = gated(model, list(own), bench.run.mix) if variant.tune and variant.how == "route" else nullcontext()
    with applied(model, own), learns:
        if variant.tune:
            teacher = bench.model(variant.parts)
            tune(model, variant.tune, bench.run, bench.texts, teacher, lambda *n: bench.tell(variant.name, *n))
        losses = bench.losses(model, variant.name)
    return AdaptResult(asdict(variant), capacities, share, losses)
