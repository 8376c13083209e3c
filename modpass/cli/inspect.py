"""``modpass inspect``: which blocks can be routed, and why the others cannot."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text
from torch import nn

from modpass.blocks import Blocks, find_blocks
from modpass.cli.console import console, grid, status
from modpass.cli.options import Check, Factory, Model
from modpass.cli.source import is_routed, load_source
from modpass.files import whole_file
from modpass.model import RoutedModel
from modpass.parts import parts_of
from modpass.picture import picture
from modpass.sides import hoisted_values, side_inputs

__all__ = ["command"]

LEGEND = (
    "stream: B batch, S sequence, then the width; parts: what --parts can route beside the whole block; hoisted: "
    "how many values do not depend on the tokens and are computed once, outside of the block, and those it reads"
)

DotFile = Annotated[
    Path | None,
    typer.Option(
        "--dot",
        metavar="FILE",
        dir_okay=False,
        show_default="none",
        help="Also write a picture for Graphviz, as text: blocks, side inputs, refusals. Needs "
        "pip install 'modpass[dot]'.",
    ),
]


def command(model: Model, factory: Factory = None, check: Check = None, dot: DotFile = None) -> None:
    """Show the blocks that can be routed.

    For each other candidate the reason is shown why it cannot.
    """
    with status("loading"):
        source = load_source(model, factory=factory)
    if is_routed(source):
        for flag, given in (("--dot", dot), ("--check", check)):
            if given is not None:
                message = f"'{source.name}' is routed already; give its dense model, or leave it out"
                raise typer.BadParameter(message, param_hint=f"'{flag}'")
        assert isinstance(source.model, RoutedModel)
        _print_routed(source.model)
        return
    with status("tracing"):
        blocks = find_blocks(source.model, source.example_inputs, check=check)
    _print_found(source.model, blocks)
    if dot is not None:
        text = picture(blocks)
        with whole_file(dot) as temporary:
            temporary.write_text(text, encoding="utf-8")
        console().print(f"wrote {dot}; for an image: dot -Tsvg {dot} -o {dot.with_suffix('.svg')}", markup=False)


def _print_found(model: nn.Module, blocks: Blocks) -> None:
    out = console()
    if blocks.found:
        table = grid(
            "block",
            "class",
            "stream",
            "parameters",
            "parts",
            "side inputs",
            "hoisted",
            numbers=("parameters",),
        )
        for block in blocks:
            count = parameters(_module(model, block.name))
            row = (
                block.name,
                block.kind,
                block.stream_shape,
                f"{count:,}",
                ", ".join(n for n, cut in parts_of(block.analysis).items() if not isinstance(cut, str)) or "none",
                "\n".join(f"{side}: {gather}" for side, gather in side_inputs(block.analysis).items()) or "none",
                ": ".join(filter(None, [str(len(block.analysis.hoisted)), ", ".join(hoisted_values(block.analysis))])),
            )
            table.add_row(*map(Text, row))
        out.print(table)
        out.print(LEGEND)
    if blocks.skipped:
        refused = grid("refused", "class", "parts", "reason")
        for skipped in blocks.skipped:
            refused.add_row(
                *map(Text, (skipped.name, skipped.kind, ", ".join(skipped.parts) or "none", skipped.reason))
            )
        out.print(refused)
        branches = Counter(part for skipped in blocks.skipped for part in skipped.parts)
        for part, count in branches.items():
            out.print(f"--parts {part} routes that branch of {count} of the {len(blocks.skipped)} refused blocks")
    total, inside = parameters(model), sum(parameters(m) for m in {_module(model, b.name) for b in blocks})
    out.print(
        f"{len(blocks)} blocks can be routed, {len(blocks.skipped)} refused; {total:,} parameters, "
        f"{inside:,} of them in blocks that can be routed"
    )


def _print_routed(model: RoutedModel) -> None:
    out = console()
    table = grid("routed block", "capacity", "gate", "selection", "parts", "width", numbers=("capacity", "width"))
    parts = model.settings.get("parts", "block")
    for name, block in model.routed_blocks.items():
        row = (name, f"{block.capacity:g}", block.gate, block.selection, parts, str(block.width))
        table.add_row(*map(Text, row))
    out.print(table)
    blocks = model.routed_blocks.values()
    routers = sum(parameters(b.router) for b in blocks)
    predictors = sum(parameters(b.predictor) for b in blocks if b.predictor is not None)
    out.print(
        f"{len(blocks)} blocks are routed; {parameters(model):,} parameters, {routers:,} of them in routers"
        + (f", {predictors:,} in predictors" if predictors else "")
    )


def parameters(module: nn.Module) -> int:
    """The number of parameters; a shared one counts once.

    >>> parameters(nn.Linear(2, 3))
    9
    """
    return sum(p.numel() for p in module.parameters())


def _module(model: nn.Module, block: str) -> nn.Module:
    """The module of a block; ``layer@1`` is the second call of ``layer``."""
    return model.get_submodule(block.partition("@")[0])
