"""What enters a block beside its stream, in words."""

from __future__ import annotations

from torch import Tensor, fx

from modpass.analysis import Analysis
from modpass.symbols import shape_of, value_of

__all__ = ["hoisted_values", "side_inputs"]


def side_inputs(analysis: Analysis) -> dict[str, str]:
    """Each side input by name, and the dims by which it follows the chosen tokens; "whole" if by none.

    >>> from modpass.blocks import find_blocks
    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    >>> side_inputs(find_blocks(encoder, (torch.randn(2, 5, 8),))[0].analysis)
    {}
    """
    found: dict[str, str] = {}
    for node in analysis.tokens:
        for side in node.all_input_nodes:
            gather = analysis.gathers.get((node, side))
            if gather is not None:
                found[side.name] = str(gather)
            elif _is_whole(side, analysis):
                found.setdefault(side.name, "whole")
    return found


def hoisted_values(analysis: Analysis) -> tuple[str, ...]:
    """What the block makes without its tokens and then uses with them: computed once, at the full length.

    >>> hoisted_values(Analysis(None, None, None, 1, 8, [], []))
    ()
    """
    made = set(analysis.hoisted)
    return tuple(dict.fromkeys(a.name for n in analysis.tokens for a in n.all_input_nodes if a in made))


def _is_whole(side: fx.Node, analysis: Analysis) -> bool:
    """Whether an ungathered value is worth a word: it comes from outside, or has a free length of its own."""
    inner = side is analysis.stream or side in analysis.tokens
    if inner or side.op == "get_attr" or not isinstance(value_of(side), Tensor):
        return False
    free = any(not size.is_Integer and not analysis.sizes.is_batch(size) for size in shape_of(value_of(side)))
    return free or side not in analysis.hoisted
