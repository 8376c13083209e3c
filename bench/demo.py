"""The whole way on a pretrained language model: route, export, verify, build engines, measure.

``python -m modpass.bench.demo [FOLDER]`` (``make demo``) takes some minutes on two cores.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

import modpass
from modpass.bench.cases import Case
from modpass.bench.measuring import Plan
from modpass.bench.models import load_bundled
from modpass.bench.report import table, write_report
from modpass.bench.run import run_case
from modpass.bench.runners import runners_named
from modpass.bench.script import exit_code
from modpass.bench.sources import Source
from modpass.exporters import FixedShape, build_engine, export_onnx, verify

__all__ = ["demo", "main"]

MODEL, BATCH, SEQUENCE, CAPACITY = "smollm2-135m", 1, 1024, 0.125
# Random routers send a pretrained model off its usual ground, where single tokens may amplify rounding beyond the
# bound in some draws: one draw for all runs.
SEED = 0


def demo(folder: Path, model: str = MODEL, sequence: int = SEQUENCE, plan: Plan | None = None) -> None:
    """Route ``model``, export dense and routed, verify both, build both engines in float16, and print the table.

    Args:
        folder: where files go.
        model: a bundled model's name.
        sequence: tokens.
        plan: how long to measure.

    Raises:
        ModpassError: any step failed; the message says which.
    """
    console = Console(highlight=False)
    torch.manual_seed(SEED)
    source = Source(load_bundled(model), None, model)
    dense = modpass.trace(source.model)
    # Untrained routers: the unit gate keeps what the pretrained blocks do to the tokens that pass.
    routed = modpass.mod_transform(source.model, CAPACITY, gate="unit")
    blocks = list(routed.routed_blocks)
    console.print(f"[bold]{model}[/]: {len(blocks)} blocks routed at capacity {CAPACITY}, {blocks[0]} ... {blocks[-1]}")
    shape = FixedShape(BATCH, sequence)
    for name, graph in (("dense", dense), ("routed", routed)):
        _export(console, folder, name, graph, shape)

    def tell(what: str, done: int, _: int) -> None:
        if not done:
            console.print(what)

    case = Case(model, BATCH, sequence, CAPACITY, gate="unit")
    result = run_case(
        case,
        runners_named(None),
        plan or Plan(warmup=1, repeats=5),
        source=source,
        workdir=folder / "bench",
        command="make demo",
        progress=tell,
    )
    console.print(table(result))
    for path in write_report(result, folder / "report.md"):
        console.print(f"wrote {path}")


def _export(console: Console, folder: Path, name: str, model: modpass.RoutedModel, shape: FixedShape) -> None:
    path = folder / f"{name}.onnx"
    console.print(f"[bold]{name}[/]: ONNX, float32")
    export_onnx(model, path, shape)
    console.print(str(verify(model, path).check()))
    half, engine = folder / f"{name}.fp16.onnx", folder / f"{name}.fp16.engine"
    console.print(f"[bold]{name}[/]: TensorRT-RTX engine for compute capability 8.9, float16")
    export_onnx(model, half, shape, dtype="float16")
    manifest = build_engine(half, engine, flavor="tensorrt-rtx", compute_capability="8.9")
    console.print(f"{engine.name}: {(manifest.bytes or 0) / 1e6:.0f} MB in {manifest.build_seconds:.1f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return exit_code(lambda: demo(Path(given[0] if given else "out/demo")))


if __name__ == "__main__":
    sys.exit(main())
