"""The coverage run itself: models in processes of their own, which may hang or die, and records."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modpass.bench import coverage
from modpass.bench.coverage import CoverageResult, CoverageRow
from modpass.bench.coverage_pool import Job, run_jobs
from modpass.bench.coverage_result import code_digest
from modpass.errors import InputError, StateError

Report = Callable[[str, Any], None]


# The works below run in a child.


def fine(report: Report) -> None:
    report("start", "make")
    report("done", ("make", 0.5))
    report("fact", ("skipped", [["layers.0", "a scan"]]))


def hangs(report: Report) -> None:
    report("start", "trace")
    time.sleep(600)


def burns(report: Report) -> None:
    report("start", "unit")
    while True:
        pass


def dies(report: Report) -> None:
    report("start", "onnx")
    os.write(2, b"terminate called: what(): out of luck\n")
    os.abort()


def raises(report: Report) -> None:
    report("start", "unit")
    raise RuntimeError("a bug of the stages")


@pytest.mark.slow
def test_a_process_that_hangs_burns_or_dies_becomes_a_row_and_the_run_goes_on() -> None:
    works = {"hangs": hangs, "burns": burns, "dies": dies, "raises": raises, "fine": fine}
    jobs = [Job(CoverageRow("other", name, "Stand-in"), work) for name, work in works.items()]
    rows = {row.name: row for row in run_jobs(jobs, 2, 5.0)}
    assert set(rows) == set(works)
    assert (rows["hangs"].outcome, rows["hangs"].failed) == ("timed out", "trace")
    assert rows["hangs"].reason.startswith("no end within")
    assert (rows["burns"].outcome, rows["burns"].failed) == ("timed out", "unit")
    assert (rows["dies"].outcome, rows["dies"].failed) == ("crashed", "onnx")
    assert "signal 6" in rows["dies"].reason
    assert "out of luck" in rows["dies"].reason
    assert (rows["raises"].outcome, rows["raises"].failed) == ("crashed", "unit")
    assert "a bug of the stages" in rows["raises"].reason
    assert rows["fine"].failed is None
    assert rows["fine"].passed == ("make",)
    assert rows["fine"].skipped == (("layers.0", "a scan"),)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(CoverageResult((CoverageRow("other", "torch-encoder", "X", ("make",)),), "make").to_json())
    result = coverage.run("other", ["torch-encoder"], last="make", progress=False, record=file)
    assert [r.kind for r in result.rows] == ["X"]
    with pytest.raises(StateError, match="holds a run up to the stage 'make', not 'unit'"):
        coverage.run("other", ["torch-encoder"], last="unit", progress=False, record=file)


def test_rows_of_an_outcome_or_of_other_code_are_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    refused = CoverageRow("other", "torch-encoder", "X", (), "make", "refused", "why", code=code_digest())
    stale = CoverageRow("other", "torch-decoder", "Y", ("make",), code="older")
    kept = CoverageRow("other", "torch-transformer", "Z", ("make",), code=code_digest())
    file.write_text(CoverageResult((refused, stale, kept), "make").to_json())
    names = ["torch-encoder", "torch-decoder", "torch-transformer"]
    result = coverage.run("other", names, last="make", progress=False, record=file, again=["refused", "stale"])
    assert [r.kind for r in result.rows] == ["TransformerEncoder", "TransformerDecoder", "Z"]
    assert all(r.outcome == "passed" and r.code == code_digest() for r in result.rows)
    assert len(CoverageResult.from_json(file.read_text()).rows) == 3


@pytest.mark.slow
def test_a_run_measures_each_model_in_its_own_process(tmp_path: Path) -> None:
    result = coverage.run(
        "other", ["torch-encoder", "torch-transformer"], last="unit", progress=False, record=tmp_path / "rows.json"
    )
    assert CoverageResult.from_json((tmp_path / "rows.json").read_text()).rows
    assert [r.name for r in result.rows] == ["torch-encoder", "torch-transformer"]
    assert all(r.failed is None and r.reached("unit") and r.blocks for r in result.rows)
    assert "torch" in result.versions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": ["lama"]}, "there is no architecture 'lama' in causal-lm"),
        ({"last": "moon"}, "there is no stage 'moon'; there are: make, run, trace"),
        ({"again": ["bad"]}, "there is no outcome 'bad'; there are: passed, refused, failed"),
        ({"jobs": 0}, "jobs is 0 and timeout_s 300; both must be positive"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_runs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        coverage.run("causal-lm", **options)
