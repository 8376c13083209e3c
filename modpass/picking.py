"""Which of the found blocks are routed, and the capacity of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from modpass.blocks import Block, Blocks
from modpass.errors import BlockError
from modpass.functional import check_capacity

__all__ = ["Chosen", "capacities_of", "pick"]

Chosen = Iterable[str] | Callable[[Block], bool]  # a text is one name, or "auto"


def pick(found: Blocks, every: int, chosen: Chosen | None) -> list[Block]:
    """The blocks to route, in the order in which they run: every so many of a stack, or those that were chosen.

    Raises:
        BlockError: there are none, or one that was named cannot be routed.
    """
    if not found.found:
        raise BlockError(
            f"no block can be routed:\n{found}"
            if found.skipped
            else "no block was found: no module repeats and sums its input with its output",
            found.skipped,
        )
    if chosen is None:
        stacks: dict[str, list[Block]] = defaultdict(list)
        for block in found:
            stacks[block.group].append(block)
        picked = [b for stack in stacks.values() for b in stack[every - 1 :: every]]
    elif callable(chosen):
        picked = [b for b in found if chosen(b)]
    else:
        picked = _by_name(found, [chosen] if isinstance(chosen, str) else list(chosen))
    if not picked:
        raise BlockError(f"no block is left to route (every={every}); there are: {', '.join(found.names())}")
    order = {b.name: i for i, b in enumerate(found)}
    return sorted(picked, key=lambda b: order[b.name])


def _by_name(found: Blocks, names: list[str]) -> list[Block]:
    blocks, refused = {b.name: b for b in found}, {s.name: s.reason for s in found.skipped}
    for name in names:
        if name in refused:
            raise BlockError(f"block '{name}' cannot be routed: {refused[name]}")
        if name not in blocks:
            raise BlockError(f"there is no block '{name}'; there are: {', '.join(blocks)}")
    return [blocks[n] for n in dict.fromkeys(names)]


def capacities_of(capacity: float | Mapping[str, float], picked: list[Block], found: Blocks) -> dict[str, float]:
    """The capacity of each picked block by name, from one for all or one by name.

    Raises:
        BlockError: a name that is no block, or a picked block without a capacity.
        CapacityError: a capacity outside (0, 1].
    """
    if not isinstance(capacity, Mapping):
        return {b.name: check_capacity(capacity) for b in picked}
    unknown = [n for n in capacity if n not in found.names()]
    missing = [b.name for b in picked if b.name not in capacity]
    if unknown or missing:
        raise BlockError(
            f"capacity names no such block: {', '.join(unknown)}"
            if unknown
            else f"capacity has no entry for the routed block {', '.join(missing)}"
        )
    return {b.name: check_capacity(capacity[b.name], f"block '{b.name}'") for b in picked}
