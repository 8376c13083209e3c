"""65,536 tokens at 12.5 %: exported without TopK, equal to PyTorch, built by TensorRT-RTX."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from modpass.bench.long import measure_long
from modpass.cli import app


@pytest.mark.slow
def test_65536_tokens_export_agree_with_torch_and_build(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="pip install 'modpass[tensorrt-rtx]'")
    row = measure_long(65_536, tmp_path)
    assert (row.sequence, row.k, row.selector) == (65_536, 8_192, "bisection")
    assert max(d.max_rel for d in row.parity.outputs) < 1e-5
    assert set(row.parity.choices.values()) == {1.0}
    assert row.engine_bytes > 0
    assert row.capturable
    assert "| equal token choices | 100.00% |" in str(row)


def test_the_command_prints_the_table() -> None:
    pytest.importorskip("tensorrt_rtx", reason="pip install 'modpass[tensorrt-rtx]'")
    found = CliRunner().invoke(app, ["study", "long", "64"])
    assert found.exit_code == 0, found.output
    assert "| tokens, of them chosen in each block | 64, 8 |" in found.output
    assert "| selector | topk |" in found.output


def test_a_sequence_of_no_tokens_is_refused() -> None:
    found = CliRunner().invoke(app, ["study", "long", "0"])
    assert found.exit_code == 2
    assert "SEQUENCE" in found.output
