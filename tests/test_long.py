"""65,536 tokens at 12.5 %: exported without TopK, equal to PyTorch, built by TensorRT-RTX."""

from __future__ import annotations

from pathlib import Path

import pytest

from modpass.bench.long import main, measure_long


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


def test_a_sequence_of_no_tokens_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["0"]) == 1
    assert "sequence" in capsys.readouterr().err
