"""``modpass inspect``: which blocks can be routed, and why the others cannot."""

from __future__ import annotations

from rich.text import Text
from torch import nn

from modpass.blocks import Block, Blocks, find_blocks
from modpass.cli.console import console, grid, status
from modpass.cli.options import Factory, Model
from modpass.cli.source import load_source
from modpass.model import RoutedModel

__all__ = ["command"]

LEGEND = (
    "stream: B batch, S sequence, then the width; hoisted: values that do not depend on the tokens and are "
    "computed once, outside of the block"
)


def command(model: Model, factory: Factory = None) -> None:
    """Show the blocks that can be routed.

    For each other candidate the reason is shown why it cannot.
    """
    with status("loading"):
        source = load_source(model, factory=factory)
    if isinstance(source.model, RoutedModel) and source.model.routed_blocks:
        _print_routed(source.model)
        return
    with status("tracing"):
        blocks = find_blocks(source.model, source.example_inputs)
    _print_found(source.model, blocks)


def _print_found(model: nn.Module, blocks: Blocks) -> None:
    out = console()
    if blocks.found:
        table = grid(
            "block",
            "class",
            "stream",
            "parameters",
            "side inputs",
            "hoisted",
            numbers=("parameters", "hoisted"),
        )
        for block in blocks:
            count = parameters(_module(model, block.name))
            row = (
                block.name,
                block.kind,
                block.stream_shape,
                f"{count:,}",
                sides(block),
                str(len(block.analysis.hoisted)),
            )
            table.add_row(*map(Text, row))
        out.print(table)
        out.print(LEGEND)
    if blocks.skipped:
        refused = grid("refused", "class", "reason")
        for skipped in blocks.skipped:
            refused.add_row(*map(Text, (skipped.name, skipped.kind, skipped.reason)))
        out.print(refused)
    total, inside = parameters(model), sum(parameters(m) for m in {_module(model, b.name) for b in blocks})
    out.print(
        f"{len(blocks)} blocks can be routed, {len(blocks.skipped)} refused; {total:,} parameters, "
        f"{inside:,} of them in blocks that can be routed"
    )


def _print_routed(model: RoutedModel) -> None:
    out = console()
    table = grid("routed block", "capacity", "gate", "selection", "width", numbers=("capacity", "width"))
    for name, block in model.routed_blocks.items():
        row = (name, f"{block.capacity:g}", block.gate, block.selection, str(block.width))
        table.add_row(*map(Text, row))
    out.print(table)
    routers = sum(parameters(b.router) for b in model.routed_blocks.values())
    out.print(
        f"{len(model.routed_blocks)} blocks are routed; {parameters(model):,} parameters, {routers:,} of "
        "them in routers"
    )


def sides(block: Block) -> str:
    """Each side input and the dims by which it follows the chosen tokens, one a line."""
    lines = dict.fromkeys(f"{side.name}: {gather}" for (_, side), gather in block.analysis.gathers.items())
    return "\n".join(lines) or "none"


def parameters(module: nn.Module) -> int:
    """The number of parameters; a shared one counts once.

    >>> parameters(nn.Linear(2, 3))
    9
    """
    return sum(p.numel() for p in module.parameters())


def _module(model: nn.Module, block: str) -> nn.Module:
    """The module of a block; ``layer@1`` is the second call of ``layer``."""
    return model.get_submodule(block.partition("@")[0])
