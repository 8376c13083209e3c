"""The stages one model goes through, each of which may fail with a reason of one line."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import modpass
from modpass.bench.coverage_branch import DenseBranches, copy_dense
from modpass.bench.coverage_checks import TOLERANCE, AttentionWatch, Wrong, check_equal, floats, gap
from modpass.bench.coverage_models import Made, make_model, with_inputs
from modpass.blocks import locate
from modpass.errors import BlockError, MissingExtraError, ModpassError
from modpass.exporters import FixedShape, build_engine, export_onnx, verify
from modpass.exporters.shapes import example_tensors
from modpass.inputs import as_named
from modpass.parts import Parts
from modpass.reference import Setting, routed_reference
from modpass.tracing import capture
from modpass.transform import route_traced

__all__ = ["STAGES", "Refused", "failure", "run_stages"]

STAGES = ("make", "run", "trace", "blocks", "unit", "reference", "onnx", "onnxruntime", "tensorrt")
CAPACITY, CHANGE, SHORT = 0.25, 1e-3, 7
_PARTS: tuple[Parts, ...] = ("block", "mlp", "attention")

Report = Callable[[str, Any], None]


class Refused(Exception):
    """A model that is left alone, with the reason."""


@dataclass
class _Subject:
    """One model on its way: what each stage leaves for the next."""

    made: Made
    inputs: dict[str, Any] = field(default_factory=dict)
    attends: bool = False
    routed: Any = None
    parts: str = ""
    dense: DenseBranches | None = None
    shape: FixedShape = field(default_factory=FixedShape)
    other: dict[str, Tensor] = field(default_factory=dict)


def run_stages(family: str, name: str, last: str, report: Report) -> None:
    """Put one model through the stages up to ``last``; tells ``report`` of each start, end and finding.

    Events: ("start", stage), ("done", (stage, seconds)), ("fact", (key, value)),
    ("fail", (stage, outcome, reason)); nothing follows a "fail".
    """
    torch.set_num_threads(1)
    subject: Any = None
    with tempfile.TemporaryDirectory() as folder:
        for stage in STAGES[: STAGES.index(last) + 1]:
            report("start", stage)
            started = time.perf_counter()
            try:
                subject = _stage(stage, subject, family, name, report, Path(folder))
            except Exception as e:
                stage, outcome, reason = failure(e, stage)
                report("fail", (stage, outcome, reason.replace(f"{folder}{os.sep}", "")))
                return
            report("done", (stage, round(time.perf_counter() - started, 2)))


def _stage(stage: str, subject: Any, family: str, name: str, report: Report, folder: Path) -> Any:
    if stage == "make":
        return _Subject(make_model(family, name))
    if stage == "run":
        _run(subject)
        report("fact", ("attends", subject.attends))
        report("fact", ("inferred", subject.made.example_inputs is None))
    elif stage == "trace":
        _transform(subject)
    elif stage == "blocks":
        _blocks(subject, report)
    elif stage == "unit":
        _unit(subject)
    elif stage == "reference":
        _reference(subject)
    elif stage == "onnx":
        export_onnx(subject.routed, folder / "model.onnx", subject.shape)
    elif stage == "onnxruntime":
        _check(verify(subject.routed, folder / "model.onnx", subject.other))
    else:
        build_engine(folder / "model.onnx", folder / "model.engine", progress=False)
    return subject


def failure(error: Exception, stage: str) -> tuple[str, str, str]:
    """The stage, the outcome and the reason of a failure, as a report of it."""
    return stage, _outcome(error, stage), _reason(error)


def _outcome(error: Exception, stage: str) -> str:
    """Tell faults ("wrong", "failed") from an answer with a reason ("refused")."""
    if isinstance(error, Wrong):
        return "wrong"
    if isinstance(error, MissingExtraError | ImportError):
        return "not installed"
    return "refused" if isinstance(error, ModpassError | Refused) and stage != "run" else "failed"


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = " ".join(lines[:2]) or type(error).__name__
    if isinstance(error, ModpassError | Wrong | Refused):
        return " ".join(lines)[:600]
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {first}"[:400]


def _run(subject: _Subject) -> None:
    made = subject.made = with_inputs(subject.made)
    subject.inputs = as_named(made.model, made.example_inputs)
    with torch.no_grad(), AttentionWatch() as watch:
        output = made.model(**subject.inputs)
    with torch.no_grad():
        again = made.model(**subject.inputs)
    subject.attends = watch.attends
    if any(gap(a, b) > TOLERANCE for a, b in zip(floats(again), floats(output), strict=True)):
        raise ValueError("it draws noise of its own: two runs differ, so that nothing can be compared")
    if not floats(output):
        raise ValueError("its output holds no floating-point tensor")
    if not all(bool(t.isfinite().any()) for t in floats(output)):
        raise ValueError("its output is not finite with random weights")


def _shorten(subject: _Subject) -> None:
    """Few tokens for a model without attention: its loops over tokens are unrolled by the trace, step by step."""
    ids = subject.inputs.get("input_ids")
    if isinstance(ids, Tensor) and ids.dim() == 2:
        cut = {
            n: v[:, :SHORT] if isinstance(v, Tensor) and v.shape == ids.shape else v for n, v in subject.inputs.items()
        }
        subject.inputs = cut
        subject.made = replace(subject.made, example_inputs=cut)


def _transform(subject: _Subject) -> None:
    """Trace, find and route every block in one call; a refusal at the blocks is kept for that stage.

    Where no whole block can be routed, a branch of each is tried: its MLP, then its attention.
    """
    if not subject.attends:
        _shorten(subject)
    traced = capture(subject.made.model, subject.made.example_inputs)
    refusal: BlockError | None = None
    for parts in _PARTS:
        if refusal is not None and not any(parts in s.parts for s in refusal.skipped):
            continue
        found = locate(traced, parts=parts)
        dense = copy_dense(traced, found) if parts != "block" else None
        try:
            subject.routed = route_traced(traced, found, 1.0, every=1, gate="unit", parts=parts)
        except BlockError as e:
            refusal = refusal or e
            continue  # with what its refused blocks say can be routed of them
        subject.parts, subject.dense = parts, dense
        return
    subject.routed = refusal


def _blocks(subject: _Subject, report: Report) -> None:
    refused = isinstance(subject.routed, BlockError)
    skipped = subject.routed.skipped if refused else subject.routed.info.skipped
    report("fact", ("blocks", 0 if refused else len(subject.routed.routed_blocks)))
    report("fact", ("parts", subject.parts))
    report("fact", ("skipped", [[s.name, s.reason] for s in skipped]))
    if refused:
        if not subject.attends:
            raise Refused("no attention in it")
        raise Refused(f"{skipped[0].name}: {skipped[0].reason}") if skipped else subject.routed


def _unit(subject: _Subject) -> None:
    """With capacity 1 and weight 1 it is the dense model, at the traced sizes and at others."""
    subject.shape, subject.other = _other_inputs(subject)
    for inputs in (subject.inputs, _called(subject, subject.other)):
        with torch.no_grad():
            wanted, found = subject.made.model(**inputs), subject.routed(**inputs)
        check_equal(found, wanted, "the dense model")


def _other_inputs(subject: _Subject) -> tuple[FixedShape, dict[str, Tensor]]:
    """Inputs of other sizes than the traced ones; of the same sizes if the model itself takes no others."""
    shape = _shape(subject.routed, 3, 29)
    try:
        tensors = _distinct(example_tensors(subject.routed, shape))
        with torch.no_grad():
            subject.made.model(**_called(subject, tensors))
    except Exception:  # the plain model's own refusal of these sizes, of any kind
        shape = _shape(subject.routed, None, None)
        tensors = _distinct(example_tensors(subject.routed, shape))
    return shape, tensors


def _distinct(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ids without repetition in a row: equal tokens have equal scores up to rounding, which no two runtimes share."""
    generator = torch.Generator().manual_seed(0)

    def draw(ids: Tensor) -> Tensor:
        if ids.is_floating_point() or ids.dim() != 2 or not ids.numel():
            return ids
        low, count = int(ids.min()), int(ids.max()) - int(ids.min()) + 1
        if count < ids.shape[1]:
            return ids
        rows = [torch.randperm(count, generator=generator)[: ids.shape[1]] + low for _ in ids]
        return torch.stack(rows).to(ids.dtype)

    return {name: draw(value) for name, value in tensors.items()}


def _reference(subject: _Subject) -> None:
    routed, inputs = subject.routed, _called(subject, subject.other)
    for block in routed.routed_blocks.values():
        block.capacity, block.gate = CAPACITY, "linear"
    blocks = routed.routed_blocks
    settings = {
        n: Setting(CAPACITY, "linear", b.router.weight, b.seq_dim, order=b.order, token_dims=b.token_dims)
        for n, b in blocks.items()
    }
    with torch.no_grad():
        dense, found = subject.made.model(**inputs), routed(**inputs)
        if subject.dense is not None:
            wanted = subject.dense.run(settings, inputs)
        else:
            with routed_reference(subject.made.plain, settings) as reference:
                wanted = reference(**inputs)
    check_equal(found, wanted, "the per-token reference")
    change = max(gap(a, b) for a, b in zip(floats(found), floats(dense), strict=True))
    if change < CHANGE:
        raise Wrong(f"routing changes the output by {change:.2g} only, so that equality says nothing")


def _check(report: Any) -> None:
    for output in report.outputs:
        if not output.max_rel <= TOLERANCE:
            raise Wrong(f"ONNX Runtime: output '{output.name}' is off by {output.max_rel:.2g}")
    for block, share in report.choices.items():
        if share < 1:
            raise Wrong(f"ONNX Runtime: block '{block}' chooses {share:.0%} of the same tokens")


def _shape(routed: modpass.RoutedModel, batch: int | None, sequence: int | None) -> FixedShape:
    """The traced size of every free dim, but for the batch and the sequence where they are given."""
    sizes: dict[str, int] = {}
    for spec in routed.inputs:
        traced = spec.example.shape if spec.example is not None else ()
        sizes |= {d: int(size) for d, size in zip(spec.dims, traced, strict=False) if isinstance(d, str)}
    rows, tokens = sizes.pop("batch", 1), sizes.pop("sequence", None)
    return FixedShape(batch or rows, tokens and (sequence or tokens), sizes)


def _called(subject: _Subject, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The inputs of a call: these tensors and the call's constants."""
    constants = {n: v for n, v in subject.inputs.items() if not isinstance(v, Tensor)}
    return {**constants, **tensors}
