"""The bench room: cases, models with real weights, runners, timing, reports.

Names are imported when they are first asked for: a machine with torch alone can measure with torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modpass.bench.cases import CASES, Case
    from modpass.bench.flops import FlopCount, count_flops
    from modpass.bench.measuring import Plan, measure
    from modpass.bench.models import BUNDLED, INSTALL_MODELS, load_bundled, load_tokenizer
    from modpass.bench.report import markdown, table, write_report
    from modpass.bench.result import Measurement, Peer, Result, Row
    from modpass.bench.run import run_case
    from modpass.bench.runners import RUNNERS, Runner, runners_named
    from modpass.bench.sources import Source, load_model
    from modpass.bench.sweep import Sweep, read_results, run_sweep
    from modpass.bench.timing import Ratio, Timing, interleave, ratio

_PLACES = {
    "cases": ("CASES", "Case"),
    "flops": ("FlopCount", "count_flops"),
    "measuring": ("Plan", "measure"),
    "models": ("BUNDLED", "INSTALL_MODELS", "load_bundled", "load_tokenizer"),
    "report": ("markdown", "table", "write_report"),
    "result": ("Measurement", "Peer", "Result", "Row"),
    "run": ("run_case",),
    "runners": ("RUNNERS", "Runner", "runners_named"),
    "sources": ("Source", "load_model"),
    "sweep": ("Sweep", "read_results", "run_sweep"),
    "timing": ("Ratio", "Timing", "interleave", "ratio"),
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "BUNDLED",
    "CASES",
    "INSTALL_MODELS",
    "RUNNERS",
    "Case",
    "FlopCount",
    "Measurement",
    "Peer",
    "Plan",
    "Ratio",
    "Result",
    "Row",
    "Runner",
    "Source",
    "Sweep",
    "Timing",
    "count_flops",
    "interleave",
    "load_bundled",
    "load_model",
    "load_tokenizer",
    "markdown",
    "measure",
    "ratio",
    "read_results",
    "run_case",
    "run_sweep",
    "runners_named",
    "table",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """The name, from the module that it is in."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
