"""Peak memory of one call, measured apart from its time."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["device_growth", "resident_growth", "torch_device_growth"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_growth(call: Callable[[], object]) -> int | None:
    """Bytes by which resident memory rises at most during one call; None where only Linux could say.

    Source: proc(5): writing 5 to ``clear_refs`` resets the peak ``VmHWM``.

    >>> grown = resident_growth(lambda: torch.ones(1 << 23))
    >>> grown is None or grown > 30_000_000
    True
    """
    before = _reset_peak()
    call()
    peak = _status_bytes("VmHWM")
    return None if before is None or peak is None else max(0, peak - before)


def torch_device_growth(call: Callable[[], object]) -> int:
    """Bytes by which torch's own allocations on the GPU rise at most during one call.

    >>> torch_device_growth(dict) if torch.cuda.is_available() else 0
    0
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def device_growth(call: Callable[[], object]) -> int:
    """Bytes that one call takes from the GPU's free memory and keeps, as a runtime with its own arena does.

    Right for the first call only; later ones find the arena filled.

    >>> device_growth(dict) if torch.cuda.is_available() else 0
    0
    """
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    call()
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info()
    return max(0, before - after)


def _reset_peak() -> int | None:
    """Start a new peak; the resident bytes now."""
    gc.collect()
    try:
        # Memory that was freed but kept by the allocator would hide the growth.
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR.write_text("5")
    except (OSError, AttributeError):
        return None
    return _status_bytes("VmRSS")


def _status_bytes(key: str) -> int | None:
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = next((line.split()[1] for line in lines if line.startswith(f"{key}:")), None)
    return None if kilobytes is None else int(kilobytes) * 1024
