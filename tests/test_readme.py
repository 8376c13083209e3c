"""Every block of the README runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from modpass.cli import app

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.S)
COMMANDS = [line for kind, body in BLOCKS if kind == "bash" for line in body.splitlines() if line]


def test_the_readme_has_python_and_shell_blocks_and_no_others() -> None:
    assert {kind for kind, _ in BLOCKS} == {"python", "bash"}
    assert len(COMMANDS) > 4


def test_python_blocks_run_one_after_the_other(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="pip install 'modpass[tensorrt-rtx]'")
    script = "\n".join(body for kind, body in BLOCKS if kind == "python")
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "layers.5" in done.stdout
    assert (tmp_path / "encoder.engine").stat().st_size > 10_000


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_make_targets_exist(command: str) -> None:
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "python" in done.stdout


@pytest.mark.slow
def test_command_line_blocks_run(tmp_path: Path) -> None:
    for command in (c for c in COMMANDS if c.startswith("modpass ")):
        environment = {**os.environ, "COLUMNS": "160"}
        run = [sys.executable, "-m", *shlex.split(command)]
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    assert {"minilm-routed", "minilm.onnx", "minilm.engine"} <= {p.name for p in tmp_path.iterdir()}


def test_the_measured_table_names_the_command_that_prints_it() -> None:
    before, _, rest = TEXT.partition("<!-- table -->")
    command = re.findall(r"`(modpass bench [^`]*)`", before)[-1]
    assert CliRunner().invoke(app, [*shlex.split(command)[1:], "--help"]).exit_code == 0
    assert re.search(r"ONNX Runtime CPU \| \d+, \d+ \| .* \d+ %", rest.partition("<!-- end -->")[0])
