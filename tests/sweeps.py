"""Sweeps with figures of one's choice, for what reads them."""

from __future__ import annotations

from collections.abc import Sequence

from modpass.bench import Case, FlopCount, Measurement, Peer, Result, Row, Sweep, Timing
from modpass.bench.hardware import Hardware

CPU = Hardware("Some CPU", 2, 1, None, "Linux x86_64")


def measured(dense: Sequence[float], routed: Sequence[float], peak: int | None = 3 << 20) -> Row:
    """A row of these seconds, with a profile of four blocks."""
    blocks = {"layers.0": 0.1, "layers.1": 0.1, "layers.2": 0.1, "layers.3": 0.1, "": 0.05}
    return Row(
        "onnxruntime",
        "measured",
        Measurement(Timing(tuple(dense)), peak, blocks),
        Measurement(Timing(tuple(routed)), peak, blocks | {"layers.1": 0.02, "layers.3": 0.02}),
    )


def result(case: Case, *rows: Row, hardware: Hardware = CPU, ideal: float = 2.0) -> Result:
    """A result of ``case``."""
    return Result(
        case=case,
        name=case.model,
        rows=rows,
        dense_flops=FlopCount(int(1e9 * ideal), {"layers.1": 1000}),
        routed_flops=FlopCount(10**9, {"layers.1": 100}, {"layers.1": 8, "layers.3": 8}),
        inputs={"input_ids": (case.batch, case.sequence or 1)},
        hardware=hardware,
        versions={"torch": "2.13.0"},
        command="modpass bench own --sequence 64,128",
    )


def example() -> Sweep:
    """Two cases, one of them with peers and a runner that cannot run."""
    peers = (
        Peer("torch.onnx.export", Measurement(Timing((0.42, 0.41, 0.44)))),
        Peer("onnxruntime.transformers", reason="VerificationError: it computes <something> else"),
    )
    first = measured((0.4, 0.4, 0.8), (0.2, 0.25, 0.4))
    first = Row(first.runner, first.status, first.dense, first.routed, peers=peers)
    skipped = Row("onnxruntime-cuda", "skipped", reason="no CUDA provider; pip install 'modpass[gpu]'")
    return Sweep(
        (
            result(Case("own", sequence=64), first, skipped),
            result(Case("own", sequence=128), measured((0.8, 0.9, 1.1), (0.5, 0.5, 0.6))),
        ),
        {"b1-s4096-c0.125-float32": "input 'input_ids' has sequence 4096; the trace holds for 1 to 2048"},
    )
