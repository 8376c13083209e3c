"""A sweep goes on where it was stopped, refuses what does not belong together, and is judged and compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modpass.bench import Case, Plan, Result, Row, Source, Sweep, read_results, run_sweep
from modpass.bench.compare import compare
from modpass.bench.judge import judge
from modpass.bench.sweep import key
from modpass.bench.sweep_report import sweep_markdown
from modpass.errors import InputError, StateError
from tests.bench_decoder import Counting
from tests.commands import DECODER, Capture, fails, run
from tests.sweeps import CPU, example, measured, result

CASES = [Case("own", sequence=s) for s in (32, 64, 128)]
A, B = Counting("a"), Counting("b")


class Fake:
    """Stands for ``run_case``: every row takes its turn, and one may be interrupted or fail."""

    def __init__(self, stop_at: tuple[int, str] | None = None, error: BaseException | None = None) -> None:
        self.stop_at, self.error = stop_at, error
        self.measured: list[tuple[int | None, str]] = []

    def __call__(self, case: Case, runners: Any, *rest: Any) -> Result:
        _, _, _, _, _, done, keep = rest
        found, before = result(case), {row.runner: row for row in done}
        for runner in runners:
            row = before.get(runner.name)
            if row is None:
                if (case.sequence, runner.name) == self.stop_at and self.error is not None:
                    raise self.error
                self.measured.append((case.sequence, runner.name))
                row = replace(measured((2.0, 2.0), (1.0, 1.0)), runner=runner.name)
            found = replace(found, rows=(*found.rows, row))
            if keep is not None:
                keep(found)
        return found


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Sweep, Fake]]:
    def go(fake: Fake | None = None, cases: Any = CASES, plan: Plan | None = None, **more: Any) -> tuple[Sweep, Fake]:
        fake = fake or Fake()
        monkeypatch.setattr("modpass.bench.sweep.run_case", fake)
        source: Any = Source(None, None, "own")  # type: ignore[arg-type]
        runners: Any = [A, B]
        return run_sweep(cases, runners, plan or Plan(), lambda dtype: source, tmp_path, **more), fake

    return go


class TestResume:
    def test_an_interruption_costs_no_row_that_was_measured(self, sweep: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            sweep(Fake((64, "b"), KeyboardInterrupt()))
        found, fake = sweep()
        assert fake.measured == [(64, "b"), (128, "a"), (128, "b")]
        assert [[r.runner for r in x.rows] for x in found.results] == [["a", "b"]] * 3
        assert sweep()[1].measured == []

    def test_a_row_that_failed_is_tried_again(self, sweep: Any, tmp_path: Path) -> None:
        sweep()
        path = tmp_path / "cells" / "b1-s64-c0.125-float32.json"
        kept = Result.from_json(path.read_text())
        path.write_text(replace(kept, rows=(Row("a", "failed", reason="x"), kept.rows[1])).to_json())
        assert sweep()[1].measured == [(64, "a")]

    def test_a_row_that_still_cannot_run_is_not_asked_again(self, sweep: Any, tmp_path: Path, monkeypatch: Any) -> None:
        sweep()
        path = tmp_path / "cells" / "b1-s64-c0.125-float32.json"
        kept = Result.from_json(path.read_text())
        path.write_text(replace(kept, rows=(Row("a", "skipped", reason="no GPU"), kept.rows[1])).to_json())
        assert sweep()[1].measured == [(64, "a")]  # it can run by now
        path.write_text(replace(kept, rows=(Row("a", "skipped", reason="no GPU"), kept.rows[1])).to_json())
        monkeypatch.setitem(globals(), "A", Counting("a", reason="no GPU"))
        found, fake = sweep()
        assert fake.measured == []
        assert [r.status for r in found.results[1].rows] == ["skipped", "measured"]

    def test_more_cases_may_be_added(self, sweep: Any) -> None:
        sweep()
        more = Case("own", sequence=64, capacity=0.5)
        assert sweep(cases=[*CASES, more])[1].measured == [(64, "a"), (64, "b")]

    def test_other_settings_are_refused_in_words(self, sweep: Any, tmp_path: Path) -> None:
        sweep()
        with pytest.raises(
            StateError, match=r"measured with repeats 20, and here it is 5; go on with the same .*fresh"
        ):
            sweep(plan=Plan(repeats=5))
        with pytest.raises(StateError, match="measured with gate 'linear', and here it is 'unit'"):
            sweep(cases=[replace(CASES[0], gate="unit")])
        assert len(sweep(plan=Plan(repeats=5), fresh=True)[1].measured) == 6

    def test_another_machine_is_refused(self, sweep: Any, tmp_path: Path) -> None:
        sweep()
        settings = tmp_path / "cells" / "settings.json"
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "cpu": "An older one"}))
        with pytest.raises(StateError, match="measured with cpu 'An older one', and here it is"):
            sweep()

    @pytest.mark.parametrize("name", ["settings.json", "b1-s32-c0.125-float32.json"])
    def test_a_broken_file_is_named(self, sweep: Any, tmp_path: Path, name: str) -> None:
        sweep()
        (tmp_path / "cells" / name).write_text("half a li")
        with pytest.raises(StateError, match=f"{name}.*--fresh"):
            sweep()

    def test_bytes_that_are_no_text_and_rows_of_another_case_are_refused(self, sweep: Any, tmp_path: Path) -> None:
        sweep()
        first, second = (tmp_path / "cells" / f"{key(c)}.json" for c in CASES[:2])
        second.write_bytes(first.read_bytes())
        with pytest.raises(StateError, match=r"s64.* cannot be taken over: it holds the case b1-s32.*--fresh"):
            sweep()
        first.write_bytes(b"\xff\xfe")
        with pytest.raises(StateError, match=r"s32.* cannot be taken over: 'utf-8' codec.*--fresh"):
            sweep()

    def test_one_case_that_cannot_run_does_not_cost_the_others(self, sweep: Any) -> None:
        found, _ = sweep(Fake((64, "a"), InputError("too long")))
        assert [r.case.sequence for r in found.results] == [32, 128]
        assert found.failures == {"b1-s64-c0.125-float32": "too long"}

    def test_where_none_can_run_its_own_error_is_raised(self, sweep: Any) -> None:
        with pytest.raises(InputError, match=r"^too long$"):
            sweep(Fake((32, "a"), InputError("too long")), cases=CASES[:1])


class TestFiles:
    def test_a_sweep_is_read_back_as_it_was(self, tmp_path: Path) -> None:
        (tmp_path / "s.json").write_text(example().to_json())
        assert read_results(tmp_path / "s.json") == example()

    def test_a_single_result_is_read_too(self, tmp_path: Path) -> None:
        (tmp_path / "r.json").write_text(example().results[0].to_json())
        assert read_results(tmp_path / "r.json").results == example().results[:1]

    @pytest.mark.parametrize(
        ("text", "message"),
        [("{", "is not the JSON"), ('{"results": []}', "holds no result"), ("[1]", "not the JSON of a benchmark")],
    )
    def test_other_files_are_refused(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "s.json").write_text(text)
        with pytest.raises((InputError, StateError), match=message):
            read_results(tmp_path / "s.json")

    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            (("rows", 0, "dense"), None, "the row of 'onnxruntime' is measured and has no times"),
            (("rows", 0, "dense", "timing", "samples"), [1.0], "has more times of one variant than of the other"),
            (("rows", 0, "dense", "timing", "samples"), [], r"times are seconds above 0, and these are \[\]"),
            (("rows", 0, "dense", "timing", "samples"), [0.0, 1, 1], "times are seconds above 0"),
            (("rows", 0, "dense", "timing", "samples"), ["1"], "times are seconds above 0"),
            (("case", "batch"), 0, "batch is 0; it must be at least 1"),
        ],
    )
    def test_figures_that_no_measurement_gives_are_refused(
        self, path: tuple[Any, ...], value: Any, message: str
    ) -> None:
        raw = place = json.loads(example().results[0].to_json())
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        with pytest.raises(StateError, match=f"misses a field or has a wrong one: .*{message}"):
            Result.from_dict(raw)

    def test_the_markdown_holds_peers_and_failures(self) -> None:
        text = sweep_markdown(example())
        assert "| 100% | 2.00× [1.80, 2.00] | 2.00× | 400, 720, 792 | 250, 370, 397 | 3.0, 3.0 | 3 rounds |" in text
        assert "our dense is 1.02× [0.79, 1.04] as fast" in text
        assert "not measured: VerificationError: it computes <something> else" in text
        assert "b1-s4096-c0.125-float32 failed: input 'input_ids' has sequence 4096" in text


class TestCompare:
    def sweep(self, dense: float, routed: float, **more: Any) -> Sweep:
        return Sweep((result(CASES[0], measured([dense] * 4, [routed] * 4), **more),))

    def test_the_same_twice_is_not_slower(self) -> None:
        assert compare(example(), example()).slower(0.0) == []

    def test_what_became_slower_is_named(self) -> None:
        slower = compare(self.sweep(0.8, 0.4), self.sweep(0.8, 0.44)).slower(0.05)
        assert slower == [
            "b1-s32-c0.125-float32 onnxruntime: speed-up 2.00× to 1.82×, 10.0% worse",
            "b1-s32-c0.125-float32 onnxruntime: routed time 400 ms to 440 ms, 10.0% worse",
        ]

    def test_a_machine_that_slowed_down_as_a_whole_keeps_its_ratio(self) -> None:
        before, after = self.sweep(0.8, 0.4), self.sweep(1.6, 0.8)
        assert compare(before, after, "ratio").slower(0.05) == []
        assert len(compare(before, after, "time").slower(0.05)) == 2

    def test_times_of_two_machines_are_shown_and_not_judged(self) -> None:
        found = compare(self.sweep(0.8, 0.4), self.sweep(1.6, 0.8, hardware=replace(CPU, cpu="Another")))
        assert found.slower(0.05) == []
        assert found.note == "cpu was Some CPU, now it is Another"

    def test_a_row_that_is_not_measured_any_more_is_a_failure(self) -> None:
        gone = Sweep((result(CASES[0], Row("onnxruntime", "failed", reason="x")),))
        assert compare(self.sweep(0.8, 0.4), gone).slower(9) == [
            "b1-s32-c0.125-float32 onnxruntime: measured before, and not any more"
        ]

    def test_benchmarks_of_other_cases_are_refused(self) -> None:
        with pytest.raises(InputError, match="no measured row is in both benchmarks; before: b1-s32"):
            compare(self.sweep(0.8, 0.4), Sweep((result(CASES[1], measured([1.0], [1.0])),)))

    def test_a_benchmark_of_another_model_is_refused(self) -> None:
        with pytest.raises(InputError, match=r"'own' before and 'own' now are not the same model: dense, b1-s32"):
            compare(self.sweep(0.8, 0.4), self.sweep(0.8, 0.4, ideal=3.0))

    def test_noise_is_told(self) -> None:
        changes = compare(example(), example()).changes
        assert all(c.noisy for c in changes)
        assert not any(c.noisy for c in compare(self.sweep(0.8, 0.4), self.sweep(0.9, 0.5)).changes)


class TestJudge:
    @pytest.mark.parametrize(("routed", "passed"), [(0.51, True), (0.52, False)])
    def test_efficiency_is_held_against_97_percent(self, routed: float, passed: bool) -> None:
        (verdict,) = judge(Sweep((result(CASES[0], measured([1.0], [routed])),)))
        assert verdict.passed == passed

    @pytest.mark.parametrize(("routed", "passed"), [(1.019, True), (1.03, False)])
    def test_routing_every_token_may_cost_2_percent(self, routed: float, passed: bool) -> None:
        (verdict,) = judge(Sweep((result(replace(CASES[0], capacity=1.0), measured([1.0], [routed])),)))
        assert verdict.asked == "routing every token costs at most 2%"
        assert verdict.passed == passed

    def test_dense_is_held_against_the_plain_exporter(self) -> None:
        verdicts = judge(example())
        assert [(v.asked, v.passed) for v in verdicts] == [
            ("efficiency at least 97%", True),
            ("dense at least as fast as torch.onnx.export", True),
            ("efficiency at least 97%", False),
        ]


class TestCommand:
    @pytest.fixture
    def report(self, tmp_path: Path) -> Path:
        (tmp_path / "own.json").write_text(replace(example(), failures={}).to_json())
        return tmp_path / "own.json"

    def test_a_report_is_compared_and_written_again_without_measuring(self, report: Path, capsys: Capture) -> None:
        options = ["--compare", report, "--fail-if-slower", "5%", "--out", report.parent / "new"]
        out, err = run(capsys, "bench", report, *options)
        assert err == ""
        assert "within noise" in out
        assert sorted(p.name for p in (report.parent / "new").iterdir()) == ["own.html", "own.json", "own.md"]

    def test_slower_rows_are_named_with_exit_code_1(self, report: Path, capsys: Capture) -> None:
        slow = example().results[0]
        slow = replace(slow, rows=(measured((0.4, 0.4, 0.8), (0.4, 0.45, 0.5)),))
        (report.parent / "slow.json").write_text(Sweep((slow,)).to_json())
        command = ["bench", report.parent / "slow.json", "--compare", report, "--fail-if-slower", "5%"]
        out, err = run(capsys, *command, code=1)
        assert "SLOWER" in out
        assert err.startswith("modpass: 2 of the figures became worse by more than 0.05: b1-s64-c0.125-float32 onnx")

    def test_judge_fails_with_the_bounds_that_do_not_hold(self, report: Path, capsys: Capture) -> None:
        out, err = run(capsys, "bench", report, "--judge", code=1)
        assert out.count("pass ") == 2
        assert "modpass: 1 of 3 bounds do not hold: b1-s128-c0.125-float32 onnxruntime (efficiency" in err

    def test_a_report_cannot_be_measured_otherwise(self, report: Path, capsys: Capture) -> None:
        message = fails(capsys, 2, "bench", report, "--sequence", 64)
        assert "'--sequence': '" in message
        assert "own.json' is a report, which was measured already; leave it out" in message

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--fail-if-slower", "5%"], "there is nothing to be slower than; give --compare"),
            (["--capacity", "0.5,2"], "'2': capacity of the sweep is 2.0; it must be a number in (0, 1]"),
            (["--batch", "1,,4"], "'': a whole number of 1 or more is needed"),
            (["--sequence", "64;128"], "several are given with commas"),
            (["--dtype", "int8"], "the weights may be float32, float16, bfloat16"),
            (["--runner", "torch,tortoise"], "no runner is called 'tortoise'"),
        ],
    )
    def test_wrong_values_are_refused(self, options: list[str], message: str, capsys: Capture) -> None:
        assert message in fails(capsys, 2, "bench", DECODER, *options)

    def test_a_report_that_is_not_there_is_refused_before_anything_is_measured(self, capsys: Capture) -> None:
        assert "'none.json' cannot be read" in fails(capsys, 1, "bench", DECODER, "--compare", "none.json")

    def test_a_grid_is_measured_and_resumed(self, tmp_path: Path, capsys: Capture) -> None:
        options = ["--sequence", "32,64", "--runner", "torch", "--repeats", 2, "--warmup", 0, "--out", tmp_path]
        out, err = run(capsys, "bench", DECODER, *options)
        assert err == ""
        assert "b1-s32-c0.125-float32" in out
        assert "b1-s64-c0.125-float32" in out
        before = (tmp_path / "tests.bench_decoder-decoder.json").read_text()
        run(capsys, "bench", DECODER, *options)
        assert (tmp_path / "tests.bench_decoder-decoder.json").read_text() == before
        assert "measured with repeats 2, and here it is 3" in fails(
            capsys, 1, "bench", DECODER, *options, "--repeats", 3
        )
