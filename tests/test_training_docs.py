"""Every block of docs/training.md runs, and the script is short."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.S)


@pytest.mark.slow
def test_the_documented_script_trains_exports_and_generates_the_same(tmp_path: Path) -> None:
    assert len(BLOCKS[0].splitlines()) < 60
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-c", "\n".join(BLOCKS)]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    accuracies = [float(a) for a in re.findall(r"accuracy ([\d.]+)%", done.stdout)]
    assert len(accuracies) == 2
    assert min(accuracies) > 85
    by_top_k, causal = map(float, re.search(r"loss ([\d.]+) by top-k, ([\d.]+) causal", done.stdout).groups())  # type: ignore[union-attr]
    assert causal < 1.03 * by_top_k < 4.0
