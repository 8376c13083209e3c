"""What a step leaves behind, written into the state where it lies, without waiting for the device.

Shapes: B rows, N slots of a cache.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from modpass.exporters.decoder_manifest import DecoderManifest

__all__ = ["Places", "settle"]

Tensors = Mapping[str, Tensor]


def settle(
    manifest: DecoderManifest, arrays: Tensors, new: Tensors, position_B: Tensor, live_B: Tensor, taken: Tensor
) -> None:
    """Write what the rows that are live leave: cache rows, what is remembered beside them, counts and places.

    ``taken`` counts (row, routed block).

    No shape and no operator depends on what the tensors hold, so that a CUDA graph can hold all of it.
    """
    taken.zero_()
    here = Places(position_B, live_B)
    for cache in manifest.caches:
        here.write(arrays[cache.name], new[f"{cache.name}.new"], cache.dim)
    for state in manifest.states:
        here.replace(arrays[state.name], new[f"{state.name}.new"])
    for block in manifest.routing:
        count_B = arrays[block.count]
        took_B = (new[f"{block.count}.new"] > count_B) & live_B
        slots = Places(count_B.clamp(max=block.slots - 1), took_B)
        for cache in block.caches:
            slots.write(arrays[cache.name], new[f"{cache.name}.new"], cache.dim)
        slots.write(arrays[block.places], position_B[:, None], 1)
        count_B += took_B
        taken += took_B.sum()


class Places:
    """Where in its cache each row writes, and which rows do.

    The others are written as they were: to leave them out would need their number, for which the host would have to
    wait. Indices are made once for all caches of a kind, as on a GPU every operator counts.

    >>> cache = torch.zeros(2, 3)
    >>> Places(torch.tensor([2, 0]), torch.tensor([True, False])).write(cache, torch.ones(2, 1), 1)
    >>> cache.tolist()
    [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    """

    def __init__(self, place_B: Tensor, rows_B: Tensor) -> None:
        self.place_B, self.rows_B = place_B, rows_B
        self._made: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def write(self, cache: Tensor, new: Tensor, dim: int) -> None:
        """Put ``new``, one slot long, into ``cache``, whose dim ``dim`` counts slots.

        A cache may have several entries a row, one for each head.
        """
        entry, place, wanted = self._indices(cache.shape[0])
        moved, fresh = cache.movedim(dim, 1), new.movedim(dim, 1)[:, 0]
        wanted = wanted.view(-1, *[1] * (fresh.dim() - 1))
        moved[entry, place] = torch.where(wanted, fresh, moved[entry, place])

    def replace(self, state: Tensor, new: Tensor) -> None:
        """Put all of ``new`` into ``state``, for the rows that write."""
        _, _, wanted = self._indices(state.shape[0])
        state.copy_(torch.where(wanted.view(-1, *[1] * (state.dim() - 1)), new, state))

    def _indices(self, entries: int) -> tuple[Tensor, Tensor, Tensor]:
        if entries not in self._made:
            entry = torch.arange(entries, device=self.place_B.device)
            row = entry // (entries // self.place_B.shape[0])
            self._made[entries] = (entry, self.place_B[row], self.rows_B[row])
        return self._made[entries]
