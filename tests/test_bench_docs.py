"""docs/bench.md: its commands are taken as they stand, and its tables name the command that prints them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from modpass.cli import app

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
COMMANDS = [line for body in re.findall(r"```bash\n(.*?)```", TEXT, re.S) for line in body.splitlines() if line]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("modpass ")])
def test_a_documented_command_has_the_options_that_there_are(command: str) -> None:
    assert CliRunner().invoke(app, [*shlex.split(command)[1:], "--help"]).exit_code == 0


def test_an_option_that_is_not_there_would_be_noticed() -> None:
    assert CliRunner().invoke(app, ["bench", "m", "--no-such-option", "--help"]).exit_code == 2


def test_the_script_is_there_and_can_be_run() -> None:
    scripts = [shlex.split(c)[0] for c in COMMANDS if not c.startswith("modpass ")]
    assert set(scripts) == {"bench/gpu.sh"}
    assert (ROOT / "bench" / "gpu.sh").stat().st_mode & 0o111


@pytest.mark.parametrize(
    ("name", "row"), [("plan", r"\| prefill, at least \| [\d.]+ ms"), ("check", r"\| onnxruntime")]
)
def test_each_table_follows_its_command(name: str, row: str) -> None:
    before, _, rest = TEXT.partition(f"<!-- {name} -->")
    assert re.findall(r"modpass plan smollm2-135m [^\n]*\n```", before)
    assert re.search(row, rest.partition(f"<!-- end {name} -->")[0])
