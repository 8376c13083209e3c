"""Which causal language models can be decoded: each step by step, against its own full forward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from modpass.bench.coverage_checks import TOLERANCE, check_equal, floats
from modpass.bench.coverage_models import make_model, with_inputs
from modpass.bench.coverage_report import counts, grid, origin
from modpass.bench.coverage_result import CoverageResult
from modpass.bench.coverage_stages import failure
from modpass.decode import decode_step
from modpass.inputs import as_named
from modpass.transform import trace

__all__ = ["DECODE_STAGES", "render_decode", "run_decode_stages"]

DECODE_STAGES = ("make", "run", "trace", "decode")
ROWS, TOKENS = 2, 24

Report = Callable[[str, Any], None]


def run_decode_stages(name: str, report: Report) -> None:
    """One model: made, run, traced, then ``TOKENS`` decode steps of ``ROWS`` rows against one forward over all."""
    torch.set_num_threads(1)
    subject: Any = None
    for stage in DECODE_STAGES:
        report("start", stage)
        started = time.perf_counter()
        try:
            subject = _STEPS[stage](name, subject)
        except Exception as e:
            report("fail", failure(e, stage))
            return
        report("done", (stage, round(time.perf_counter() - started, 2)))


def _run(name: str, made: Any) -> Any:
    made = with_inputs(made)
    with torch.no_grad():
        made.model(**as_named(made.model, made.example_inputs))
    return made


def _decode(name: str, model: Any) -> Any:
    step = decode_step(model, batch=ROWS, max_sequence=TOKENS, padding=False)
    ids_name, rows = step.info.tokens[0].name, step.info.tokens[0].shape[0]
    example: Any = next(s.example for s in model.inputs if s.name == ids_name)
    ids = torch.stack([torch.randperm(int(example.max()) - 1)[:TOKENS] + 2 for _ in range(rows)])
    given = {s.name: torch.ones(ROWS, TOKENS, dtype=s.dtype) for s in model.inputs if s.name != ids_name}
    with torch.no_grad():
        wanted = floats(model(**{ids_name: ids, **given}))[0]
        state, found = step.state(), []
        for t in range(TOKENS):
            outputs = step.advance({ids_name: ids[:, t : t + 1]}, torch.full((ROWS,), t), state)
            found.append(next(v for v in outputs.values() if v.is_floating_point()))
    check_equal(torch.cat(found, 1), wanted, "its full forward")
    return model


_STEPS: dict[str, Callable[[str, Any], Any]] = {
    "make": lambda name, _: make_model("causal-lm", name),
    "run": _run,
    "trace": lambda name, made: trace(made.model, made.example_inputs),
    "decode": _decode,
}


def render_decode(result: CoverageResult) -> str:
    """Counts and a line for each model that cannot be decoded, as markdown.

    >>> render_decode(CoverageResult(())).splitlines()[0]
    '# Decode coverage'
    """
    names = result.registered.get("causal-lm", ())
    missing = [n for n in names if n not in {r.name for r in result.rows}]
    stopped = ((r.name, str(r.failed), r.outcome, r.reason) for r in result.rows if r.failed)
    parts = [
        "# Decode coverage",
        origin(result, "modpass coverage --decode"),
        grid(("family", *DECODE_STAGES), [counts("causal-lm", result.rows, DECODE_STAGES)]),
        f"**decode**: {TOKENS} steps of {ROWS} rows equal one full forward within {TOLERANCE:g}. {len(result.rows)} of "
        f"{len(names)} architectures were measured" + (f"; not: {', '.join(missing)}." if missing else "."),
        grid(("model", "stops at", "outcome", "reason"), stopped),
    ]
    return "\n\n".join(parts) + "\n"
