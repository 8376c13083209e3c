"""``modpass plan``: what a model should take on a GPU that is not here, dense beside routed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modpass.cli.console import console, grid, mebibytes, progress
from modpass.cli.options import (
    Batch,
    Capacity,
    Dims,
    Dtype,
    DtypeOption,
    Every,
    Factory,
    Model,
    PartsOption,
    Sequence,
    parse_dims,
)
from modpass.cli.source import Routing, load_source, refuse_routed
from modpass.errors import InputError, ModpassError

if TYPE_CHECKING:
    from rich.table import Table

    from modpass.bench import Case
    from modpass.bench.gpus import Machine
    from modpass.bench.plan import Prediction, Side

__all__ = ["command"]

Gpu = Annotated[
    str,
    typer.Option(
        "--gpu",
        metavar="NAME",
        help="h200, h100, h100-pcie, a100, l40s, l4, a10, rtx-4090; 'cpu' is this machine, measured; any name with "
        "--flops and --bandwidth.",
    ),
]
Flops = Annotated[
    float | None,
    typer.Option(
        "--flops",
        metavar="TFLOPS",
        min=0.000001,
        show_default="the data sheet's",
        help="Peak of your machine in --dtype, in 10^12 operations per second; what a product of large matrices "
        "reaches there is nearer to the truth than a data sheet.",
    ),
]
Bandwidth = Annotated[
    float | None,
    typer.Option(
        "--bandwidth", metavar="GB/S", min=0.001, show_default="the data sheet's", help="Its memory's, in GB/s."
    ),
]
Memory = Annotated[
    float | None, typer.Option("--memory", metavar="GB", min=0.001, show_default="the data sheet's", help="Its size.")
]
Check = Annotated[
    Path | None,
    typer.Option(
        "--check",
        metavar="JSON",
        dir_okay=False,
        show_default="none",
        help="The JSON of a report of 'modpass bench MODEL': set the predicted speed-up beside each measured one.",
    ),
]


def command(
    model: Model,
    gpu: Gpu = "h200",
    flops: Flops = None,
    bandwidth: Bandwidth = None,
    memory: Memory = None,
    batch: Batch = 1,
    sequence: Sequence = None,
    dim: Dims = None,
    dtype: DtypeOption = "float32",
    capacity: Capacity = None,
    every: Every = None,
    parts: PartsOption = None,
    factory: Factory = None,
    check: Check = None,
) -> None:
    """Predict times, memory and caches of MODEL on a GPU.

    Counted are operations and bytes. An operator takes as long as its operations at the GPU's peak, or its bytes at
    its bandwidth, whichever is more: the least time that there is, before launches and what is not fused.
    """
    from modpass.bench import CASES, Case
    from modpass.bench.gpus import machine_named
    from modpass.bench.plan import predict

    own = [None if value is None else value * unit for value, unit in ((flops, 1e12), (bandwidth, 1e9), (memory, 1e9))]
    machine = machine_named(gpu, dtype, *own)
    given = Routing(capacity=capacity, every=every, parts=parts).given()
    if check is not None:
        _check(model, machine, check, factory, given)
        return
    machine.peak(dtype)
    case = CASES.get(model, Case(model, sequence=None))
    case = replace(case, batch=batch, dtype=dtype, dims=parse_dims(dim), **given)
    with progress() as tell:
        tell("loading", 0, 0)
        source = load_source(model, dtype, factory)
        refuse_routed(source, *given)
        tell("counting", 0, 0)
        found = predict(replace(case, sequence=sequence or case.sequence), source, machine)
    _print(*_table(found))


def _table(found: Prediction) -> tuple[Table, list[str]]:
    """The figures, and what is to be said below them: a caption would be wrapped to the table's width."""
    case, machine = found.case, found.machine
    shape = f"{case.batch} × {case.sequence or 'fixed'} tokens, {case.dtype}, capacity {case.capacity:g}"
    table = grid("", "dense", "routed", "dense / routed", title=f"{case.model}: {shape}, on {machine.title}",
                 numbers=("dense", "routed", "dense / routed"))  # fmt: skip
    for name, show, values in _figures(found):
        ratio = f"{values[0] / values[1]:.2f}" if values[1] else ""
        table.add_row(name, *map(show, values), ratio)
    notes = [f"{machine.source}: {machine.peak(case.dtype) / 1e12:.4g} TFLOP/s, {machine.bandwidth / 1e9:.4g} GB/s"]
    if found.no_decode:
        notes.append(f"no decode: {found.no_decode}")
    for name, side in (("dense", found.dense), ("routed", found.routed)):
        if side.memory > machine.memory:
            notes.append(f"{name} does not fit: {side.memory / 1e9:.3g} of {machine.memory / 1e9:.4g} GB")
    return table, notes


def _figures(found: Prediction) -> list[tuple[str, Any, tuple[float, float]]]:
    def both(name: str, show: Any, get: Any) -> tuple[str, Any, tuple[float, float]]:
        return name, show, (get(found.dense), get(found.routed))

    def milliseconds(value: float) -> str:
        return f"{value * 1e3:.4g} ms"

    def figure(unit: str) -> Any:
        return lambda value: f"{value:.4g}{unit}"

    lines = [
        both("prefill, at least", milliseconds, lambda s: s.seconds),
        both("of which bound by memory", lambda v: f"{v:.0%}", lambda s: s.memory_bound),
        both("operations", figure(" GFLOP"), lambda s: s.flops / 1e9),
        both("bytes moved", mebibytes, lambda s: s.bytes),
        both("weights", mebibytes, lambda s: s.weights),
        both("largest operator", mebibytes, lambda s: s.working),
    ]
    if found.dense.decode and found.routed.decode:
        lines += [
            both("decode step, at least", milliseconds, lambda s: s.decode.seconds),
            both("tokens per second, at most", figure(""), lambda s: found.case.batch / s.decode.seconds),
            both("bytes read in a step", mebibytes, lambda s: int(s.decode.bytes)),
            both("caches of keys and values", mebibytes, lambda s: s.decode.cache_bytes),
        ]
    return [*lines, both("memory, at least", mebibytes, _memory)]


def _memory(side: Side) -> int:
    return side.memory


def _check(model: str, machine: Machine, path: Path, factory: str | None, given: dict[str, Any]) -> None:
    """Predicted beside measured, for each measured row of a report."""
    from modpass.bench import read_results
    from modpass.bench.plan import ratio_at

    if given:
        message = "with --check the report says how it was routed; leave it out"
        raise typer.BadParameter(message, param_hint=f"'--{next(iter(given))}'")
    results = [r for r in read_results(path).results if r.case.model == model]
    if not results:
        raise InputError(f"'{path}' holds no result of MODEL '{model}'")
    title = f"{model}: speed-up of routed over dense"
    columns = ("case", "runner", "counted operations", "roofline", "measured", "measured / roofline")
    table = grid(*columns, title=title, numbers=columns[2:])
    rows = 0
    dtypes: list[Dtype] = ["float32", "float16", "bfloat16"]
    with progress() as tell:
        for dtype in dtypes:
            cases = [r for r in results if r.case.dtype == dtype]
            source = load_source(model, dtype, factory) if cases else None
            for done, result in enumerate(cases):
                tell("counting", done, len(cases))
                assert source is not None
                predicted = ratio_at(result.case, source, machine)
                for row in (r for r in result.rows if r.ratio is not None):
                    assert row.ratio is not None
                    measured = f"{row.ratio.value:.2f} [{row.ratio.q1:.2f}, {row.ratio.q3:.2f}]"
                    share = f"{row.ratio.value / predicted:.2f}"
                    table.add_row(
                        _key(result.case), row.runner, f"{result.ideal:.2f}", f"{predicted:.2f}", measured, share
                    )
                    rows += 1
    if not rows:
        raise ModpassError(f"'{path}' holds no measured row of '{model}'")
    peaks = f"{machine.peak(results[0].case.dtype) / 1e12:.4g} TFLOP/s, {machine.bandwidth / 1e9:.4g} GB/s"
    _print(table, [f"roofline of {machine.title} ({machine.source}): {peaks}"])


def _print(table: Table, notes: list[str]) -> None:
    console().print(table)
    for note in notes:
        console().print(note, markup=False, soft_wrap=True)


def _key(case: Case) -> str:
    from modpass.bench.sweep import key

    return key(case)
