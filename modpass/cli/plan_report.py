"""``modpass plan-report``: what an engine will do on a GPU, read without one where it can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from modpass.cli.console import console, grid, mebibytes

if TYPE_CHECKING:
    from modpass.exporters.plan_report import PlanReport

__all__ = ["command", "show"]

Engines = Annotated[
    list[Path],
    typer.Argument(
        metavar="ENGINE [OTHER]",
        exists=True,
        dir_okay=False,
        show_default=False,
        help="An engine of 'modpass build', or two to compare: dense, then routed.",
    ),
]
Kernels = Annotated[
    int, typer.Option("--kernels", metavar="N", min=0, help="List the N kernels that move the most bytes, too.")
]


def command(engines: Engines, kernels: Kernels = 0) -> None:
    """Report what an engine will do on a GPU.

    Kernels, device memory, bytes moved, and whether a CUDA graph can hold it. A TensorRT-RTX engine is read without a
    GPU; one of TensorRT needs the GPU that it was built for.
    """
    if len(engines) > 2:
        raise typer.BadParameter("one engine is reported, or two are compared", param_hint="'ENGINE'")
    show(engines, kernels)


def show(engines: Sequence[Path], kernels: int) -> None:
    """Print the reports side by side, with the second over the first where there are two."""
    from modpass.exporters.plan_report import plan_report

    reports = [plan_report(engine) for engine in engines]
    two = len(reports) == 2
    table = grid("", *(str(e) for e in engines), *(["second / first"] if two else []))
    for name, value, form in _ROWS:
        found = [value(r) for r in reports]
        cells = ["not told" if v is None else form(v) for v in found]
        ratio = [_ratio(*found)] if two else []
        table.add_row(*map(Text, (name, *cells, *ratio)))
    console().print(table)
    console().print("Bytes moved count whole tensors at each kernel: an upper bound, not a measurement.", markup=False)
    for report in reports if kernels else []:
        _show_kernels(report, kernels)


def _ratio(first: Any, second: Any) -> str:
    if isinstance(first, bool) or not isinstance(first, int) or not isinstance(second, int) or not first:
        return ""
    return f"{second / first:.2f}"


def _show_kernels(report: PlanReport, count: int) -> None:
    table = grid(report.engine, "MiB", "ONNX nodes", numbers=("MiB",))
    for kernel in sorted(report.kernels, key=lambda k: -k.bytes)[:count]:
        table.add_row(*map(Text, (kernel.name, f"{kernel.bytes / 2**20:.2f}", ", ".join(kernel.nodes))))
    console().print(table)


_ROWS: list[tuple[str, Callable[[PlanReport], Any], Callable[[Any], str]]] = [
    ("compute capability", lambda r: r.compute_capabilities, ", ".join),
    ("routed blocks", lambda r: r.routed_blocks, str),
    ("engine", lambda r: r.file_bytes, mebibytes),
    ("kernels", lambda r: len(r.kernels), str),
    ("device memory", lambda r: r.device_memory, mebibytes),
    ("bytes moved, nominal", lambda r: r.moved_bytes, mebibytes),
    ("one CUDA graph", lambda r: r.capturable, lambda v: "yes" if v else "no"),
    ("told by", lambda r: r.source, str),
]
