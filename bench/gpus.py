"""What a machine can do at best: operations per second by dtype, bytes per second, memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from modpass.errors import InputError

__all__ = ["GPUS", "Machine", "machine_named", "this_cpu"]


@dataclass(frozen=True)
class Machine:
    """Peak operations per second by dtype (dense, without sparsity), bytes per second, bytes of memory.

    source: where the figures come from.
    """

    title: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: float
    source: str

    def peak(self, dtype: str) -> float:
        """Operations per second in a dtype.

        Raises:
            InputError: none is known.

        >>> GPUS["h200"].peak("bfloat16") / 1e12
        989.5
        """
        if dtype not in self.flops:
            known = ", ".join(self.flops)
            raise InputError(f"no peak of {self.title} is known in {dtype}; there is {known}, or give --flops")
        return self.flops[dtype]


def _gpu(title: str, single: float, half: float, bandwidth: float, memory: float, sheet: str) -> Machine:
    """TFLOP/s in float32 and on tensor cores in half precision, GB/s, GB."""
    flops = {"float32": single * 1e12, "float16": half * 1e12, "bfloat16": half * 1e12}
    return Machine(title, flops, bandwidth * 1e9, memory * 1e9, sheet)


# Data sheets print tensor-core figures with sparsity, twice the dense ones that are here.
GPUS: dict[str, Machine] = {
    "h200": _gpu("H200 SXM", 67, 989.5, 4800, 141, "NVIDIA H200 Tensor Core GPU, data sheet"),
    "h100": _gpu("H100 SXM", 67, 989.5, 3350, 80, "NVIDIA H100 Tensor Core GPU, data sheet"),
    "h100-pcie": _gpu("H100 PCIe", 51, 756, 2000, 80, "NVIDIA H100 Tensor Core GPU, data sheet"),
    "a100": _gpu("A100 80GB SXM", 19.5, 312, 2039, 80, "NVIDIA A100 Tensor Core GPU, data sheet"),
    "l40s": _gpu("L40S", 91.6, 362, 864, 48, "NVIDIA L40S GPU, data sheet"),
    "l4": _gpu("L4", 30.3, 121, 300, 24, "NVIDIA L4 Tensor Core GPU, data sheet"),
    "a10": _gpu("A10", 31.2, 125, 600, 24, "NVIDIA A10 Tensor Core GPU, data sheet"),
    "rtx-4090": _gpu("GeForce RTX 4090", 82.6, 165.2, 1008, 24, "NVIDIA Ada GPU Architecture, white paper"),
}


def machine_named(
    name: str, dtype: str, flops: float | None = None, bandwidth: float | None = None, memory: float | None = None
) -> Machine:
    """A machine by name, ``"cpu"`` for this one, with figures of one's own over those that are known.

    Args:
        name: a key of ``GPUS``, ``"cpu"``, or any other name where both ``flops`` and ``bandwidth`` are given.
        dtype: what ``flops`` is for.
        flops, bandwidth, memory: operations per second, bytes per second, bytes.

    Raises:
        InputError: the name is not known.

    >>> machine_named("own", "float16", 100e12, 1e12).peak("float16")
    100000000000000.0
    """
    if name in GPUS:
        known = GPUS[name]
    elif flops is not None and bandwidth is not None:
        known = Machine(name, {}, bandwidth, float("inf"), "given on the command line")
    elif name == "cpu":
        known = this_cpu()
    else:
        raise InputError(
            f"no GPU is called '{name}'; there are: {', '.join(GPUS)}, cpu (this machine, measured), "
            "or any name with --flops and --bandwidth"
        )
    peaks = known.flops if flops is None else {**known.flops, dtype: flops}
    own = "" if flops is None and bandwidth is None and memory is None else ", with figures of your own"
    source = known.source if known.source.startswith("given") else known.source + own
    return Machine(known.title, peaks, bandwidth or known.bandwidth, memory or known.memory, source)


def this_cpu() -> Machine:
    """This machine, by the best of some products of matrices and some copies, with torch's threads.

    >>> this_cpu().bandwidth > 0
    True
    """
    a = torch.randn(512, 512)
    c = torch.empty(1 << 24, dtype=torch.uint8)
    target = torch.empty_like(c)
    flops = 2 * 512**3 / _best(lambda: a @ a)
    bandwidth = 2 * c.numel() / _best(lambda: target.copy_(c))
    source = f"measured here: product of matrices of 512, copy of 16 MiB, {torch.get_num_threads()} threads"
    return Machine("this CPU", {"float32": flops}, bandwidth, float("inf"), source)


def _best(call: Callable[[], object], times: int = 7) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
