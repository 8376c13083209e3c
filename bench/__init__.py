"""The bench room: cases, models with real weights, runners, timing, reports."""

from modpass.bench.cases import CASES, Case
from modpass.bench.flops import FlopCount, count_flops
from modpass.bench.models import BUNDLED, INSTALL_MODELS, load_bundled, load_tokenizer
from modpass.bench.report import markdown, table, write_report
from modpass.bench.result import Measurement, Result, Row
from modpass.bench.run import Plan, measure, run_case
from modpass.bench.runners import RUNNERS, Runner, runners_named
from modpass.bench.sources import Source, load_model
from modpass.bench.timing import Ratio, Timing, interleave, ratio

__all__ = [
    "BUNDLED",
    "CASES",
    "INSTALL_MODELS",
    "RUNNERS",
    "Case",
    "FlopCount",
    "Measurement",
    "Plan",
    "Ratio",
    "Result",
    "Row",
    "Runner",
    "Source",
    "Timing",
    "count_flops",
    "interleave",
    "load_bundled",
    "load_model",
    "load_tokenizer",
    "markdown",
    "measure",
    "ratio",
    "run_case",
    "runners_named",
    "table",
    "write_report",
]
