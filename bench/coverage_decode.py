"""Which causal language models can be decoded: each step by step, against its own full forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from modpass.bench.coverage_checks import TOLERANCE, Wrong, floats
from modpass.bench.coverage_models import make_model, with_inputs
from modpass.bench.coverage_result import CoverageRow
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
    ids_name = step.info.tokens[0].name
    example: Any = next(s.example for s in model.inputs if s.name == ids_name)
    ids = torch.stack([torch.randperm(int(example.max()) - 1)[:TOKENS] + 2 for _ in range(ROWS)])
    given = {s.name: torch.ones(ROWS, TOKENS, dtype=s.dtype) for s in model.inputs if s.name != ids_name}
    with torch.no_grad():
        wanted = floats(model(**{ids_name: ids, **given}))[0]
        state, found = step.state(), []
        for t in range(TOKENS):
            outputs = step.advance({ids_name: ids[:, t : t + 1]}, torch.full((ROWS,), t), state)
            found.append(next(v for v in outputs.values() if v.is_floating_point()))
    gap = float((torch.cat(found, 1) - wanted).abs().max() / wanted.abs().max())
    if not gap <= TOLERANCE:
        raise Wrong(f"step by step it is off from its full forward by {gap:.2g}")
    return model


_STEPS: dict[str, Callable[[str, Any], Any]] = {
    "make": lambda name, _: make_model("causal-lm", name),
    "run": _run,
    "trace": lambda name, made: trace(made.model, made.example_inputs),
    "decode": _decode,
}


def render_decode(rows: Iterable[CoverageRow]) -> str:
    """Counts and a line for each model that cannot be decoded, as markdown.

    >>> render_decode([]).splitlines()[0]
    '# Decode coverage'
    """
    rows = list(rows)
    counts = [sum(r.reached(s) for r in rows) for s in DECODE_STAGES]
    lines = ["# Decode coverage", "", f"| causal-lm | {' | '.join(DECODE_STAGES)} |", "|---|---|---|---|---|"]
    lines += [f"| {len(rows)} | {' | '.join(map(str, counts))} |", ""]
    lines += [
        f"*decode*: {TOKENS} steps of {ROWS} rows equal one full forward within {TOLERANCE:g}. Not decoded:",
        "",
        "| model | stage | outcome | reason |",
        "|---|---|---|---|",
    ]
    lines += [f"| {r.name} | {r.failed} | {r.outcome} | {r.reason.replace('|', '/')} |" for r in rows if r.failed]
    return "\n".join(lines) + "\n"
