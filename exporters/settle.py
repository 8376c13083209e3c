"""What a step leaves behind, written into the state where it lies, without waiting for the device.

Shapes: B rows, N slots of a cache.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from modpass.exporters.decoder_manifest import DecoderManifest

__all__ = ["settle", "write_rows"]

Tensors = Mapping[str, Tensor]


def settle(
    manifest: DecoderManifest, arrays: Tensors, new: Tensors, position_B: Tensor, live_B: Tensor, taken: Tensor
) -> None:
    """Write new cache rows, counts and places of the rows that are live; ``taken`` counts (row, routed block).

    No shape and no operator depends on what the tensors hold, so that a CUDA graph can hold all of it.
    """
    taken.zero_()
    for cache in manifest.caches:
        write_rows(arrays[cache.name], new[f"{cache.name}.new"], cache.dim, position_B, live_B)
    for block in manifest.routing:
        count_B, places_BN = arrays[block.count], arrays[block.places]
        took_B = (new[f"{block.count}.new"] > count_B) & live_B
        slot_B = count_B.clamp(max=block.slots - 1)
        for cache in block.caches:
            write_rows(arrays[cache.name], new[f"{cache.name}.new"], cache.dim, slot_B, took_B)
        write_rows(places_BN, position_B[:, None], 1, slot_B, took_B)
        count_B += took_B
        taken += took_B.sum()


def write_rows(cache: Tensor, new: Tensor, dim: int, place_B: Tensor, rows_B: Tensor) -> None:
    """Put ``new``, one slot long, into ``cache`` at ``place`` of the rows that ``rows`` holds true for.

    A cache may have several entries a row, one for each head. The other rows are written as they were: to leave them
    out would need their number, for which the host would have to wait.

    >>> cache = torch.zeros(2, 3)
    >>> write_rows(cache, torch.ones(2, 1), 1, torch.tensor([2, 0]), torch.tensor([True, False]))
    >>> cache.tolist()
    [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    """
    entries, each = cache.shape[0], cache.shape[0] // place_B.shape[0]
    entry = torch.arange(entries, device=cache.device)
    row = entry // each
    place = place_B[row]
    moved, fresh = cache.movedim(dim, 1), new.movedim(dim, 1)[:, 0]
    wanted = rows_B[row].view(-1, *[1] * (fresh.dim() - 1))
    moved[entry, place] = torch.where(wanted, fresh, moved[entry, place])
