"""``bench/gpu.sh`` without a GPU: its dry run, and what it says of what is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from modpass.bench import Plan, Result
from modpass.bench.gpu import TINY, _complaints, main, measure_gpu
from tests.commands import ROOT

SCRIPT = ROOT / "bench" / "gpu.sh"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


def script(folder: Path, *arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": python, "PYTHONPATH": ""}
    command = [str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_dry_run_writes_the_rows_that_a_cpu_can_run(tmp_path: Path) -> None:
    done = script(tmp_path, "--dry-run", "--rows", "torch,tensorrt-rtx", "--out", "gpu.json")
    assert done.returncode == 0, done.stderr
    assert "wrote gpu.json" in done.stdout
    found = Result.from_json((tmp_path / "gpu.json").read_text())
    assert (found.rows[0].runner, found.rows[0].status) == ("torch", "measured")
    assert (found.rows[1].runner, len(found.rows)) == ("tensorrt-rtx", 2)


@pytest.mark.slow
def test_the_whole_dry_run(tmp_path: Path) -> None:
    done = script(tmp_path, "--dry-run")
    assert done.returncode == 0, done.stderr
    rows = {row["runner"]: row for row in json.loads((tmp_path / "out" / "gpu.json").read_text())["rows"]}
    assert rows["torch"]["status"] == rows["onnxruntime"]["status"] == "measured"
    assert rows["torch-compile"]["status"] == "measured" or "compiler" in rows["torch-compile"]["reason"]


def test_packages_that_are_missing_are_named(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    done = script(tmp_path, "--dry-run", python=str(bare))
    assert done.returncode == 1
    assert "lacks torch, numpy, safetensors; every row needs them: pip install torch numpy safetensors" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_fails_loudly(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path / "gpu.json")]) == 1
    assert "gpu.sh: no NVIDIA GPU that torch" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_unknown_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--rows", "tortoise"]) == 2
    assert "there is no row 'tortoise'; there are: torch-cuda" in capsys.readouterr().err


class TestInProcess:
    @pytest.fixture(scope="class")
    def found(self) -> Result:
        kept: list[Result] = []
        return measure_gpu(TINY, ["torch", "torch-cuda", "onnxruntime"], Plan(0, 1), kept.append, 0.0, lambda _: None)

    def test_rows_after_the_time_is_up_fail_instead(self, found: Result) -> None:
        assert {row.reason for row in found.rows} == {"no time was left after 0 s"}

    def test_every_failure_is_a_complaint(self, found: Result) -> None:
        assert _complaints(found, ["torch"])[0] == "torch was failed: no time was left after 0 s"

    def test_a_missing_package_keeps_its_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def gone(name: str) -> Any:
            raise ModuleNotFoundError("No module named 'onnxruntime'", name="onnxruntime")

        monkeypatch.setattr("modpass.bench.gpu._runner", gone)
        monkeypatch.setattr("modpass.bench.gpu.no_gpu", lambda: None)
        kept: list[Result] = []
        found = measure_gpu(TINY, ["onnxruntime-cuda"], Plan(0, 1), kept.append, say=lambda _: None)
        assert found.rows[0].reason == "it needs the package 'onnxruntime', which is not installed"
        assert kept == [found]


def test_torch_rows_need_no_exporter() -> None:
    absent = ["onnx", "onnx_ir", "onnxruntime", "onnxscript", "rich", "typer", "transformers", "matplotlib", "jinja2"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}));"  # None there: cannot be imported
        "import modpass.bench.gpu as gpu; print(gpu._runner('torch-cuda').name);"
        "from modpass.bench import Plan; kept = [];"
        "gpu.measure_gpu(gpu.TINY, ['torch', 'onnxruntime-cuda'], Plan(0, 1), kept.append, say=print)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "torch: dense " in done.stdout
    assert re.search(r"onnxruntime-cuda: skipped: (no NVIDIA GPU|it needs the package)", done.stdout)
