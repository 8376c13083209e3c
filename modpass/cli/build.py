"""``modpass build``: an ONNX file with fixed shapes to a TensorRT engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from modpass.cli.console import console, mebibytes
from modpass.cli.plan_report import show

__all__ = ["command"]

Onnx = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL.onnx",
        exists=True,
        show_default=False,
        help="A file of 'modpass export', any ONNX file of fixed shapes, or a folder of 'export-decoder'.",
    ),
]
Engine = Annotated[
    Path | None,
    typer.Argument(
        metavar="OUT.engine",
        dir_okay=False,
        show_default=False,
        help="The file to write; OUT.engine.json is written beside it. A folder's engines lie in the folder.",
    ),
]
Flavor = Annotated[
    Literal["tensorrt-rtx", "tensorrt"],
    typer.Option(
        "--flavor",
        help="TensorRT-RTX builds for any GPU of its list, without one; TensorRT for this machine's.",
    ),
]
Capability = Annotated[
    list[str],
    typer.Option(
        "--compute-capability",
        metavar="X.Y",
        help="The target GPU: 8.6 Ampere, 8.9 Ada, 12.0 Blackwell. Repeat it for one engine of several (TensorRT-RTX).",
    ),
]
Level = Annotated[
    int | None,
    typer.Option(
        "--optimization-level",
        metavar="N",
        min=0,
        max=5,
        show_default="TensorRT's",
        help="0 builds fast, 5 runs fast.",
    ),
]
Workspace = Annotated[
    int | None,
    typer.Option(
        "--workspace",
        metavar="MIB",
        min=1,
        show_default="TensorRT's",
        help="Scratch memory that a layer may use at most, in MiB.",
    ),
]
TimingCache = Annotated[
    Path | None,
    typer.Option(
        "--timing-cache",
        metavar="FILE",
        dir_okay=False,
        show_default="none",
        help="Kernel timings, read if there and written back. TensorRT only.",
    ),
]
ProfilingVerbosity = Annotated[
    Literal["none", "layer_names_only", "detailed"] | None,
    typer.Option(
        "--profiling-verbosity", show_default="TensorRT's", help="What the engine can tell of its layers on a GPU."
    ),
]
Refit = Annotated[bool, typer.Option("--refit", help="Let weights be replaced in the built engine. Needs a GPU.")]
Strip = Annotated[
    bool,
    typer.Option("--strip-weights", help="Leave the weights out; they are read from the ONNX file. Needs a GPU."),
]
ReportOption = Annotated[bool, typer.Option("--report", help="Print what 'modpass plan-report' says of the engine.")]


def command(
    onnx: Onnx,
    engine: Engine = None,
    flavor: Flavor = "tensorrt-rtx",
    compute_capability: Capability = ["8.9"],  # noqa: B006  # typer makes a new list each time
    optimization_level: Level = None,
    workspace: Workspace = None,
    timing_cache: TimingCache = None,
    profiling_verbosity: ProfilingVerbosity = None,
    refit: Refit = False,
    strip_weights: Strip = False,
    report: ReportOption = False,
) -> None:
    """Build a TensorRT engine. Needs pip install 'modpass[tensorrt-rtx]' or 'modpass[tensorrt]'."""
    from modpass.exporters import build_engine

    for source, target in _pairs(onnx, engine):
        manifest = build_engine(
            source, target, flavor, compute_capability, optimization_level=optimization_level,
            workspace_bytes=None if workspace is None else workspace * 2**20, timing_cache=timing_cache,
            profiling_verbosity=profiling_verbosity, refit=refit, strip_weights=strip_weights,
            progress=sys.stderr.isatty(),
        )  # fmt: skip
        console().print(
            f"wrote {target} ({mebibytes(manifest.bytes or 0)}, {flavor}, compute capability "
            f"{' and '.join(manifest.compute_capabilities)}) in {manifest.build_seconds:.1f} s",
            markup=False,
        )
        if report:
            show([target], kernels=0)


def _pairs(onnx: Path, engine: Path | None) -> list[tuple[Path, Path]]:
    """What is built into what: one file, or both graphs of a decoder's folder."""
    if onnx.is_dir():
        if engine is not None:
            raise typer.BadParameter("the engines of a folder are written into it; leave it out", param_hint="'ENGINE'")
        found = sorted(onnx.glob("*.onnx"))
        if not found:
            raise typer.BadParameter(f"'{onnx}' holds no ONNX file", param_hint="'ONNX'")
        return [(f, f.with_suffix(".engine")) for f in found]
    if engine is None:
        raise typer.BadParameter("name the engine file to write", param_hint="'ENGINE'")
    return [(onnx, engine)]
