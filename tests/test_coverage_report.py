"""The report of the coverage run, and how two runs compare."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modpass.bench.coverage import CoverageResult, CoverageRow, compare, render
from modpass.bench.coverage_report import by_construction
from modpass.bench.coverage_stages import STAGES
from modpass.errors import StateError

Report = Callable[[str, Any], None]


ROUTED = CoverageRow("causal-lm", "a", "A", STAGES, attends=True, blocks=4, parts="block", seconds={"make": 0.1})
BRANCH = CoverageRow("causal-lm", "e", "E", STAGES, attends=True, blocks=4, parts="mlp")
HALF = CoverageRow(
    "causal-lm", "b", "B", STAGES[:5], "reference", "wrong", "off by 0.3 | more", True, True, 3, (("l.0", "a scan"),),
    parts="block",
)  # fmt: skip
CONVOLVES = CoverageRow("causal-lm", "c", "C", STAGES[:3], "blocks", "refused", "no attention in it", False)
RESULT = CoverageResult((ROUTED, HALF, CONVOLVES), versions={"torch": "2.0"})


def test_the_report_counts_stages_and_gives_each_model_its_reason() -> None:
    text = render(RESULT)
    assert "| causal-lm | 3 | 3 | 3 | 2 | 2 | 1 | 1 | 1 | 1 |" in text
    assert "| b | B | block | 3 of 4 | reference | wrong | off by 0.3 \\| more |" in text
    assert "| c | C | – | – | blocks | refused | no attention in it |" in text
    assert "torch 2.0" in text


def test_the_report_gives_each_figure_with_and_without_what_has_nothing_to_route() -> None:
    text = render(RESULT)
    assert (
        "| causal-lm | 3 | 1 of 3 (33.3%) | 1 of 2 (50.0%) | 1 of 2 (50.0%) | 1 | 0 | 1 of 1 (100.0%) | 1 | 0 |" in text
    )
    assert "- Left out of (b) in causal-lm: no attention (1): c." in text
    some = render(replace(RESULT, registered={"causal-lm": ["a", "b", "c", "d"]}))
    assert "| causal-lm | 3 of 4 | 1 of 3 (33.3%) |" in some
    assert (
        "- **Not measured** in causal-lm (1): d; if each of them traced and failed, (a) would be 1 of 4 (25.0%)."
        in some
    )


def test_the_report_tells_models_that_pass_by_a_branch_only_from_those_that_pass_as_whole_blocks() -> None:
    text = render(replace(RESULT, rows=(*RESULT.rows, BRANCH)))
    assert "(c) of transformers | passed (a) by whole blocks | by a branch only |" in text
    assert "| causal-lm | 4 | 2 of 4 (50.0%) | 2 of 3 (66.7%) | 2 of 3 (66.7%) | 1 | 1 (1 mlp) |" in text
    assert "| e | E | mlp | 4 of 4 |" in text


def test_a_record_from_before_branches_were_tried_tells_whole_blocks() -> None:
    text = CoverageResult((ROUTED, CONVOLVES)).to_json()
    old = re.sub(r',\s*"parts": "\w*"', "", text)
    assert old != text
    assert [r.parts for r in CoverageResult.from_json(old).rows] == ["block", ""]


@pytest.mark.parametrize(
    ("skipped", "expected"),
    [
        (["aten.conv1d.default convolves over tokens (kernel (4,))"], "convolution over tokens"),
        (["aten.conv1d.default makes a dim of S + 3, which is not the sequence S"], "convolution over tokens"),
        (["aten.select.int picks single tokens (node select)"], "recurrence over tokens"),
        (["its attention runs over 49 tokens, not over a dim of the stream: windows or pooled keys"] * 2, "windows"),
        (["aten.conv1d.default convolves over tokens (kernel (4,))", "it returns more than the stream"], None),
        (["aten.topk.default makes a dim of Min(2, S), which is not the sequence S"], None),
    ],
)
def test_only_what_mixes_tokens_by_construction_is_left_out(skipped: list[str], expected: str | None) -> None:
    reasons = tuple((f"l.{i}", reason) for i, reason in enumerate(skipped))
    row = CoverageRow(
        "causal-lm", "m", "M", STAGES[:3], "blocks", "refused", f"l.0: {skipped[0]}", True, skipped=reasons
    )
    found = by_construction(row)
    assert found == expected or (expected is not None and str(found).startswith(expected))
    assert by_construction(replace(row, failed="unit")) is None


def test_the_report_shows_only_the_stages_that_ran() -> None:
    text = render(CoverageResult((ROUTED,), last="unit"))
    assert "| family | make | run | trace | blocks | unit |" in text
    assert "unit, (a) of all that trace" in text
    assert "tensorrt" not in text


def test_a_result_survives_json(tmp_path: Path) -> None:
    file = tmp_path / "coverage.json"
    file.write_text(RESULT.to_json())
    assert CoverageResult.from_json(file.read_text()) == RESULT


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": [{"name": 1}], "last": "unit", "versions": {}}'])
def test_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(StateError, match="this is no coverage result"):
        CoverageResult.from_json(text)


def test_two_runs_compare_model_by_model() -> None:
    better = CoverageRow("causal-lm", "b", "B", STAGES, attends=True, blocks=4)
    worse = CoverageRow("causal-lm", "a", "A", STAGES[:2], "trace", "refused", "a guard")
    other = CoverageRow("causal-lm", "c", "C", STAGES[:3], "blocks", "refused", "another reason")
    found = compare(RESULT, CoverageResult((better, worse, other, CoverageRow("image", "d", "D"))))
    assert found.gained == ("causal-lm/b: wrong at reference: off by 0.3 | more -> passed",)
    assert found.lost == ("causal-lm/a: passed -> refused at trace: a guard",)
    assert found.changed[0].endswith("no attention in it -> refused at blocks: another reason")
    assert (found.added, found.removed) == (("image/d",), ())
    assert "gained (1)\n  causal-lm/b" in str(found)


def test_a_model_that_passes_by_a_branch_in_place_of_its_blocks_has_lost() -> None:
    whole = replace(BRANCH, parts="block")
    lost = "causal-lm/e: passed -> passed by its mlp branches only"
    assert compare(CoverageResult((whole,)), CoverageResult((BRANCH,))).lost == (lost,)
    assert compare(CoverageResult((BRANCH,)), CoverageResult((whole,))).gained[0].endswith("only -> passed")
    assert str(compare(CoverageResult((BRANCH,)), CoverageResult((BRANCH,)))) == "nothing changed"


def test_a_shorter_run_is_compared_up_to_its_last_stage() -> None:
    short = CoverageResult((CoverageRow("causal-lm", "a", "A", STAGES[:5]),), last="unit")
    assert str(compare(short, CoverageResult((ROUTED,)))) == "nothing changed"
