"""``modpass export``: MODEL to ONNX with fixed shapes, run beside PyTorch at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from modpass.cli.console import console, grid, mebibytes, status
from modpass.cli.options import (
    Batch,
    Blocks,
    Capacity,
    Check,
    Dense,
    Dims,
    Dtype,
    Every,
    Factory,
    GateOption,
    Model,
    PaddingMask,
    PartsOption,
    Seed,
    SelectionOption,
    Sequence,
    parse_dims,
)
from modpass.cli.precision import Islands, MaxError, Quantise, refuse_precision
from modpass.cli.serving import Buckets, Instances, OutFolder, Serving, Triton
from modpass.cli.source import Routing, load_source, refuse_routed, traced_dense
from modpass.model import RoutedModel

if TYPE_CHECKING:
    from modpass.exporters import FixedShape, Manifest

__all__ = ["command"]

Out = Annotated[
    Path | None,
    typer.Argument(
        metavar="OUT.onnx",
        dir_okay=False,
        show_default=False,
        help="The file to write, with its manifest OUT.onnx.json beside it; left out with --buckets and --triton.",
    ),
]
Opset = Annotated[int, typer.Option("--opset", metavar="N", min=18, max=20, help="ONNX operator set.")]
FileDtype = Annotated[
    Dtype | None,
    typer.Option(
        "--dtype",
        show_default="as loaded",
        help="Type of the weights in the file; routers and norm statistics stay in float32.",
    ),
]
Verify = Annotated[
    bool | None,
    typer.Option(
        "--verify/--no-verify",
        show_default="verify, except bfloat16, which ONNX Runtime cannot run on a CPU",
        help="Run the file in ONNX Runtime beside the model in PyTorch, and compare.",
    ),
]


def command(
    model: Model,
    out: Out = None,
    batch: Batch = 1,
    sequence: Sequence = None,
    dim: Dims = None,
    opset: Opset = 18,
    dtype: FileDtype = None,
    dense: Dense = False,
    capacity: Capacity = None,
    every: Every = None,
    blocks: Blocks = None,
    gate: GateOption = None,
    selection: SelectionOption = None,
    padding_mask: PaddingMask = None,
    parts: PartsOption = None,
    check: Check = None,
    seed: Seed = 0,
    verify: Verify = None,
    factory: Factory = None,
    buckets: Buckets = None,
    folder: OutFolder = None,
    triton: Triton = None,
    instances: Instances = 1,
    quantise: Quantise = None,
    max_error: MaxError = None,
    islands: Islands = "rule",
) -> None:
    """Write MODEL as ONNX in which every dim is a number.

    A dense MODEL is transformed first, unless --dense. With --buckets or --triton several shapes are written at once,
    for servers.
    """
    from modpass.exporters import FixedShape, export_onnx
    from modpass.exporters import verify as compare
    from modpass.exporters.verify import recorded

    serving = Serving(buckets, folder, triton, instances, out)
    refuse_precision(quantise, max_error, verify, out)
    routing = Routing(capacity, every, blocks, gate, selection, padding_mask, parts, check)
    if dense and routing.given():
        flag = next(iter(routing.given())).replace("_", "-")
        message = f"a dense model has no routed block; leave out --{flag}"
        raise typer.BadParameter(message, param_hint="'--dense'")
    dims = parse_dims(dim)
    shapes = [FixedShape(*s, dims) for s in serving.shapes(batch, sequence)]
    if serving.repack(model):
        return
    with status("loading"):
        source = load_source(model, factory=factory)
    if dense:
        refuse_routed(source, "dense")
    with status("tracing"):
        traced = traced_dense(source) if dense else routing.apply(source, seed)
    _check_sizes(traced, shapes[0])
    if out is None:
        sizes = [(s.batch, s.sequence) for s in shapes]
        serving.write(traced, sizes, source.name, verify, dims=dims, opset=opset, dtype=dtype)
        return
    with status("exporting"):
        manifest = export_onnx(traced, out, shapes[0], opset, dtype, quantise, max_error, islands)
    _print_written(out, manifest)
    if max_error is not None:
        console().print(f"within {max_error:g} of PyTorch in ONNX Runtime, {recorded(manifest)}", markup=False)
    elif verify is None and manifest.dtype == "bfloat16":
        console().print("not compared with PyTorch: ONNX Runtime cannot run bfloat16 on a CPU")
    elif verify is not False:
        with status("comparing with PyTorch"):
            report = compare(traced, out)
        console().print(f"ONNX Runtime beside PyTorch, {report}", markup=False)
        report.check()


def _check_sizes(model: RoutedModel, shape: FixedShape) -> None:
    """Say which option is missing before anything is exported."""
    free = dict.fromkeys(d for s in model.inputs for d in s.dims if isinstance(d, str))
    for name in free:
        if name not in shape.sizes():
            flag, value = ("--sequence", "N") if name == "sequence" else ("--dim", f"{name}=N")
            inputs = ", ".join(f"{s.name}[{', '.join(map(str, s.dims))}]" for s in model.inputs)
            message = f"the model's inputs are {inputs}; give {flag} {value}"
            raise typer.BadParameter(message, param_hint=f"'{flag}'")


def _print_written(out: Path, manifest: Manifest) -> None:
    table = grid("", "name", "shape", "dtype")
    for kind, specs in (("input", manifest.inputs), ("output", manifest.outputs)):
        for spec in specs:
            table.add_row(*map(Text, (kind, spec.name, " x ".join(map(str, spec.shape)), spec.dtype)))
    screen = console()
    screen.print(table)
    for name, block in manifest.routed_blocks.items():
        tokens = f"{block.k} of {block.sequence} tokens"
        how = ", by bisection: TensorRT's TopK ends at 3840" if block.selector == "bisection" else ""
        screen.print(f"{name}: {tokens} (capacity {block.capacity:g}{how})", markup=False)
    if manifest.islands:
        screen.print(f"float32 inside {manifest.dtype}: {', '.join(manifest.islands)}, as measured", markup=False)
    few = f", weights {manifest.weights}" if manifest.weights else ""
    facts = f"{mebibytes(out.stat().st_size)}, opset {manifest.opset}, {manifest.dtype}{few}"
    screen.print(f"wrote {out} ({facts}) and {out}.json", markup=False)
