"""The HTML report in a real browser: its figures are drawn, and nothing in it fails or is fetched."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modpass.bench.html import html_page
from modpass.bench.judge import judge
from tests.sweeps import example

image = pytest.importorskip("matplotlib.image")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = os.environ.get("MODPASS_BROWSER") or next((p for p in map(shutil.which, BROWSERS) if p), None)
WIDTH = 1280
HEADINGS = ["Speed-up against ideal", "Latency", "Memory", "Time in each block"]

PROBE = """<script>
const errors = [];
window.onerror = (message) => errors.push(String(message));
window.onload = () => {
  const figures = [...document.images].map((i) => {
    const box = i.getBoundingClientRect();
    return {alt: i.alt, width: i.naturalWidth, box: [box.left, box.top + scrollY, box.width, box.height]};
  });
  const found = {figures, errors, height: document.documentElement.scrollHeight, scripts: document.scripts.length};
  const element = document.createElement("pre");
  element.id = "probe";
  element.style.display = "none";
  element.textContent = JSON.stringify(found);
  document.body.append(element);
};
</script>"""


@pytest.fixture(scope="module")
def page() -> str:
    return html_page(example(), judge(example()))


def test_the_page_needs_nothing_from_elsewhere(page: str) -> None:
    assert "default-src 'none'" in page
    assert "<script" not in page
    addresses = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"' )>]{0,30})""", page)
    assert len(addresses) == len(HEADINGS)
    assert all(a.startswith("data:image/svg+xml;base64,") for a in addresses)


def test_what_a_reason_says_is_text_and_not_markup(page: str) -> None:
    assert "it computes &lt;something&gt; else" in page
    assert "<something>" not in page


def test_the_page_holds_rows_bounds_and_failures(page: str) -> None:
    for text in ("└ torch.onnx.export", "FAIL", "efficiency at least 97%", "Some CPU", "b1-s4096-c0.125-float32"):
        assert text in page, text


def test_the_same_rows_give_the_same_page(page: str) -> None:
    assert html_page(example(), judge(example())) == page


def browse(folder: Path, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    settings = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    command = [BROWSER, *settings, f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", *options]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)}, and no MODPASS_BROWSER")
class TestInABrowser:
    @pytest.fixture(scope="class")
    def seen(self, page: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        """What the browser says of the page, its console, and a screenshot of the whole of it."""
        folder = tmp_path_factory.mktemp("browser")
        (folder / "page.html").write_text(page, encoding="utf-8")
        # The copy that is asked for its figures may run the script that asks; the page itself may run none.
        probed = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', PROBE, page, count=1)
        (folder / "probe.html").write_text(probed, encoding="utf-8")
        asked = browse(folder, folder / "probe.html", f"--window-size={WIDTH},900", "--dump-dom")
        match = re.search(r'<pre id="probe"[^>]*>(.*?)</pre>', asked.stdout, re.S)
        assert match is not None, asked.stdout[-2000:]
        found = json.loads(match[1])
        shot = folder / "shot.png"
        shown = browse(
            folder, folder / "page.html", f"--window-size={WIDTH},{found['height'] + 100}", f"--screenshot={shot}"
        )
        console = [line for line in (asked.stderr + shown.stderr).splitlines() if ":CONSOLE" in line]
        return {**found, "console": console, "pixels": image.imread(shot)[..., :3]}

    def test_every_figure_is_loaded(self, seen: dict[str, Any]) -> None:
        assert [f["alt"] for f in seen["figures"]] == HEADINGS
        assert all(f["width"] > 0 for f in seen["figures"])

    def test_no_script_fails_and_the_console_is_empty(self, seen: dict[str, Any]) -> None:
        assert seen["errors"] == []
        assert seen["console"] == []

    def test_the_screenshot_shows_each_figure(self, seen: dict[str, Any]) -> None:
        """Each has ink over much of its height and width, and the blue of the routed bars."""
        for figure in seen["figures"]:
            left, top, width, height = (round(x) for x in figure["box"])
            part = seen["pixels"][top : top + height, left : left + width]
            assert part.shape[:2] == (height, width), figure["alt"]
            ink = (part < 0.9).any(-1)
            assert ink.any(0).mean() > 0.5, figure["alt"]
            assert ink.any(1).mean() > 0.5, figure["alt"]
            blue = np.abs(part - np.array([0x1F, 0x6F, 0xEB]) / 255).max(-1) < 0.05
            assert blue.mean() > 0.005, figure["alt"]

    def test_nothing_is_cut_off_at_the_side(self, seen: dict[str, Any]) -> None:
        assert (seen["pixels"][:, -8:] > 0.99).all()
