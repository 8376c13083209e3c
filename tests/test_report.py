"""The table, the markdown, the plot and the JSON of a result."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from modpass.bench import Case, FlopCount, Measurement, Result, Row, Timing, markdown, table, write_report
from modpass.bench.hardware import Hardware, command_line
from modpass.errors import InputError, StateError


@pytest.fixture
def result() -> Result:
    dense = Measurement(Timing((0.4, 0.4, 0.8)), 3 << 20)
    routed = Measurement(Timing((0.2, 0.25, 0.4)), None)
    return Result(
        case=Case("own:make", sequence=64, dims={"y.1": 3}),
        name="own:make",
        rows=(
            Row("torch", "measured", dense, routed),
            Row("onnxruntime-cuda", "skipped", reason="no CUDA provider; pip install 'modpass[gpu]'"),
            Row("tensorrt", "failed", reason="BuildError: a | b"),
        ),
        dense_flops=FlopCount(4_000_000_000, {"layers.1": 1_000_000_000}),
        routed_flops=FlopCount(1_600_000_000, {"layers.1": 100_000_000}, {"layers.1": 8}),
        inputs={"input_ids": (1, 64)},
        hardware=Hardware("Some CPU", 2, 1, None, "Linux x86_64"),
        versions={"torch": "2.13.0"},
        command="modpass bench own:make",
    )


class TestReport:
    def test_efficiency_is_measured_by_ideal(self, result: Result) -> None:
        assert result.ideal == 2.5
        assert result.efficiency(result.rows[0]) == pytest.approx(2.0 / 2.5)
        assert result.efficiency(result.rows[1]) is None

    def test_the_table_shows_every_row_and_its_reason(self, result: Result) -> None:
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(table(result))
        text = console.export_text()
        assert "80%" in text
        assert "2.00×" in text
        assert "[1.80, 2.00]" in text
        assert "skipped: no CUDA provider; pip install 'modpass[gpu]'" in text
        assert "failed: BuildError: a | b" in text
        assert "Some CPU, 2 cores, 1 threads; GPU: none" in text

    def test_the_markdown_holds_all_that_a_reader_needs(self, result: Result) -> None:
        lines = markdown(result, "plot.png").splitlines()
        assert "# own:make: input_ids 1×64; float32, capacity 0.125" in lines
        measured_row = next(line for line in lines if line.startswith("| torch | 80%"))
        assert "| 2.50× | 400 [400, 600] | 250 [225, 325] | 3.0 MiB, unknown |" in measured_row
        assert any("| skipped: no CUDA provider; pip install 'modpass[gpu]' |" in line for line in lines)
        assert any("BuildError: a \\| b" in line for line in lines)
        assert "| layers.1 | 8 | 1 | 0.1 |" in lines
        assert "![speed-up of each runner](plot.png)" in lines
        assert "| cpu | Some CPU |" in lines
        assert "| torch | 2.13.0 |" in lines
        assert "modpass bench own:make" in lines

    def test_a_report_is_three_files_beside_each_other(self, result: Result, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        paths = write_report(result, tmp_path / "new" / "own.md")
        assert [p.name for p in paths] == ["own.md", "own.json", "own.png"]
        assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["own.json", "own.md", "own.png"]
        assert "(own.png)" in paths[0].read_text(encoding="utf-8")
        assert paths[2].read_bytes().startswith(b"\x89PNG")

    def test_a_report_is_markdown_by_name(self, result: Result, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"must end in \.md"):
            write_report(result, tmp_path / "own.txt")
        assert not list(tmp_path.iterdir())

    def test_the_command_line_keeps_no_folder_of_the_program(self) -> None:
        assert command_line(["/opt/bin/modpass", "bench", "a b"]) == "modpass bench 'a b'"


class TestJson:
    def test_a_result_is_read_back_as_it_was(self, result: Result) -> None:
        assert Result.from_json(result.to_json()) == result

    def test_derived_figures_are_written_for_other_readers(self, result: Result) -> None:
        raw = json.loads(result.to_json())
        assert raw["ideal"] == 2.5
        assert raw["rows"][0]["efficiency"] == pytest.approx(0.8)
        assert raw["rows"][1]["reason"].startswith("no CUDA provider")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("nonsense", "not the JSON of a benchmark"),
            ("[]", "not the JSON of a benchmark"),
            ('{"schema": 99}', "has schema 99"),
            ('{"schema": 1}', "misses a field"),
        ],
    )
    def test_other_json_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(StateError, match=message):
            Result.from_json(text)

    def test_a_value_without_a_place_in_json_is_refused(self, result: Result) -> None:
        broken = replace(result, versions={"torch": float("nan")})
        with pytest.raises(StateError, match="cannot be written as JSON"):
            broken.to_json()
