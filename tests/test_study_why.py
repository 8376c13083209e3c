"""Why choices matter: pairs of runs that differ in the choice alone, and trained models run otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from modpass.bench.study_kept import kept
from modpass.bench.study_loop import Training
from modpass.bench.study_run import Run, RunResult, Setup
from modpass.bench.study_text import Corpus
from modpass.bench.study_why import WHY, WHY_QUICK, WhyPlan, why, why_table
from modpass.cli import app
from modpass.errors import StateError
from tests.test_study import TEXT

RUN = Run(flops=0.0, rows=2, sequence=32, validation_rows=4, points=1, steps=3)
KINDS = tuple(Setup(f"half-{s}", 16, 2, 2, 0.25, s) for s in ("expert_choice", "stochastic", "none"))
PLAN = WhyPlan(KINDS, 2, RUN)


def test_runs_of_one_seed_begin_alike_and_see_the_same_rows() -> None:
    corpus = Corpus.of(TEXT, 32)
    learned, noise, rest = (Training(s, RUN, corpus) for s in KINDS)
    own, other = dict(learned.model.named_parameters()), dict(noise.model.named_parameters())
    assert all(torch.equal(own[n], p) for n, p in rest.model.named_parameters() if "blocks" not in n)
    assert all(torch.equal(own[n], p) for n, p in other.items() if "router" not in n)
    assert sum(p.numel() for p in rest.model.parameters()) < 0.7 * sum(p.numel() for p in own.values())
    assert torch.equal(own["blocks.0.qkv.weight"], rest.model.get_parameter("blocks.0.qkv.weight"))
    draws = [t.corpus.batch(2, 32, t.draws) for t in (learned, noise, rest)]
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])
    assert learned.result.steps == rest.result.steps == 3


def test_the_study_is_kept_and_says_what_a_trained_model_loses_otherwise(tmp_path: Path) -> None:
    results = why(tmp_path, PLAN, text=TEXT)
    assert [r.setup["name"] for r in results[:3]] == [f"half-{s}-0" for s in ("expert_choice", "stochastic", "none")]
    learned, noise, rest = results[:3]
    assert set(learned.otherwise) == {"stochastic", "none"}
    assert set(noise.otherwise) == {"expert_choice", "none"}
    assert rest.otherwise == {}
    assert learned.otherwise["stochastic"] != learned.loss != learned.otherwise["none"]
    assert learned.causal is not None
    assert rest.causal is None
    assert len(json.loads((tmp_path / "why.json").read_text())["results"]) == 6
    assert "| every other block | left out |" in (tmp_path / "why.md").read_text()
    stamps = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("half-*.json")}
    why(tmp_path, PLAN, text=TEXT)
    assert stamps == {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("half-*.json")}


def test_looking_at_other_choices_leaves_the_model_as_it_was() -> None:
    training = Training(KINDS[0], RUN, Corpus.of(TEXT, 32))
    before = training._validate()
    training._otherwise()
    assert training._validate() == before
    assert {b.selection for b in training.model.routed_blocks.values()} == {"expert_choice"}


def test_differences_are_taken_pair_by_pair() -> None:
    def result(selection: str, seed: int, loss: float, **otherwise: float) -> RunResult:
        setup = {"every": 2, "selection": selection, "seed": seed}
        return RunResult(setup, 1, 1, 1, loss=loss, otherwise=otherwise)

    results = [
        result("expert_choice", 0, 1.0, stochastic=1.5, none=2.0),
        result("stochastic", 0, 1.1, expert_choice=1.1, none=1.2),
        result("expert_choice", 1, 3.0, stochastic=3.3, none=4.0),
        result("stochastic", 1, 3.3, expert_choice=3.3, none=3.4),
    ]
    assert why_table(results) == [
        ("every other block", "learned", "2.0000", "", "+0.4000 ± 0.1000", "", "+1.0000 ± 0.0000"),
        ("every other block", "random", "2.2000", "+0.2000 ± 0.1000", "", "+0.0000 ± 0.0000", "+0.1000 ± 0.0000"),
    ]


def test_plans_compare_learned_choices_with_noise_and_with_nothing() -> None:
    for plan in (WHY, WHY_QUICK):
        assert {(k.every, k.selection) for k in plan.kinds} == {
            *((2, s) for s in ("expert_choice", "stochastic", "none")),
            *((1, s) for s in ("expert_choice", "stochastic")),
        }
        assert plan.run.steps
    assert WHY.seeds > 1


def test_the_command_prints_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("modpass.bench.study_why.WHY_QUICK", PLAN)
    monkeypatch.setattr("modpass.bench.study_why.load_text", lambda: TEXT)
    found = CliRunner().invoke(app, ["study", "isoflop", "--why", "--quick", "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    assert "left out" in found.output
    assert "why.md beside it" in " ".join(found.output.split())


@pytest.mark.parametrize("name", ["a.json", "a.pt"])
def test_what_is_kept_is_not_made_again_and_not_given_to_other_settings(name: str, tmp_path: Path) -> None:
    def never() -> dict[str, float]:
        raise AssertionError("it was made again")

    made = kept(tmp_path / name, {"a": (1, 2)}, lambda: {"loss": 1.5})
    assert made == kept(tmp_path / name, {"a": (1, 2)}, never) == {"loss": 1.5}
    with pytest.raises(StateError, match=rf"'.*{name}' is of a run with other settings; give another folder"):
        kept(tmp_path / name, {"a": (1, 3)}, never)
