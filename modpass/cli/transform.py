"""``modpass transform``: a dense model in, a folder with the routed model out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modpass.cli.console import console, mebibytes, status
from modpass.cli.options import (
    Blocks,
    Capacity,
    Check,
    DtypeOption,
    Every,
    GateOption,
    Model,
    PaddingMask,
    PartsOption,
    PredictorOption,
    Seed,
    SelectionOption,
)
from modpass.cli.source import Routing, is_routed, load_source
from modpass.state import save_pretrained

__all__ = ["command"]

OutDir = Annotated[
    Path,
    typer.Argument(
        metavar="OUT_DIR",
        file_okay=False,
        show_default=False,
        help="The folder for model.safetensors and modpass.json; one that modpass wrote is replaced.",
    ),
]


def command(
    model: Model,
    out_dir: OutDir,
    capacity: Capacity = None,
    every: Every = None,
    blocks: Blocks = None,
    gate: GateOption = None,
    selection: SelectionOption = None,
    padding_mask: PaddingMask = None,
    parts: PartsOption = None,
    check: Check = None,
    predictor: PredictorOption = None,
    dtype: DtypeOption = "float32",
    seed: Seed = 0,
) -> None:
    """Route blocks of MODEL and save the result.

    The routers are new, with random weights: train them, or the whole model, next.
    """
    with status("loading"):
        source = load_source(model, dtype)
    if is_routed(source):
        raise typer.BadParameter(f"'{model}' is routed already; give a dense model", param_hint="'MODEL'")
    routing = Routing(capacity, every, blocks, gate, selection, padding_mask, parts, check, predictor)
    with status("transforming"):
        routed = routing.apply(source, seed)
    with status("saving"):
        save_pretrained(routed, out_dir)
    size = sum(p.stat().st_size for p in out_dir.iterdir())
    names = ", ".join(f"{n} ({b.capacity:g})" for n, b in routed.routed_blocks.items())
    out = console()
    out.print(f"routed {len(routed.routed_blocks)} blocks (capacity): {names}", markup=False)
    out.print(f"wrote {out_dir} ({mebibytes(size)}); load it with modpass.load", markup=False)
