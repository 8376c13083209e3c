"""What a TensorRT-RTX plan says of itself: the program text inside it, read without a GPU.

The text is not documented. It is read as a report, never to run anything; full TensorRT writes none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from modpass.errors import BuildError
from modpass.exporters.trt_api import parse_capability

__all__ = ["Kernel", "Program", "program"]

_BITS = {
    "float": 32, "half": 16, "bf16": 16, "b16": 16, "int64": 64, "int32": 32, "int8": 8, "uint8": 8, "bool": 8,
    "fp8_e4m3": 8, "int4": 4, "fp4_e2m1": 4,
}  # fmt: skip
_START = b"header {\n  version"
_HOST = {"cjmp", "jmp", "signal", "wait"}  # what the host does between kernels


@dataclass(frozen=True)
class Kernel:
    """One operation on the GPU: its name, the full bytes of what it reads and writes, the ONNX nodes it computes."""

    kind: str
    name: str
    bytes: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A plan: its targets (``"8.9"``), kernels, device memory in bytes, and whether a CUDA graph can hold it.

    The bytes of a kernel are those of whole tensors, also where it touches some rows of them alone: an upper bound.
    """

    capabilities: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    device_memory: int
    capturable: bool

    @property
    def bytes(self) -> int:
        """Nominal bytes that one run moves."""
        return sum(k.bytes for k in self.kernels)


def program(plan: bytes) -> Program:
    """The program of a plan.

    Raises:
        BuildError: the plan holds no text that can be read.

    >>> program(b"no plan")
    Traceback (most recent call last):
    modpass.errors.BuildError: the engine holds no program text, which TensorRT-RTX alone writes; ask a GPU's ...
    """
    texts = [t for t in _texts(plan) if _capabilities(t)]  # the others are kernels that are fused when loaded
    if not texts:
        raise BuildError(
            "the engine holds no program text, which TensorRT-RTX alone writes; ask a GPU's engine inspector instead"
        )
    text = max(texts, key=len)
    header, _, rest = text.partition("descriptors {")
    descriptors, _, main = rest.partition("\nmain {")
    main = main.partition("\nshape_main {")[0]
    sizes = dict(_sizes(descriptors))
    memory = sum(int(s) for s in re.findall(r"region = \{ name=devmem\w* size=(\d+)", header))
    targets = sorted({c for t in texts for c in _capabilities(t)}, key=parse_capability)
    return Program(tuple(targets), tuple(_kernels(main, sizes)), memory, "stream_capturable=1" in header)


def _texts(plan: bytes) -> Iterator[str]:
    for match in re.finditer(re.escape(_START), plan):
        end = plan.find(b"\0", match.start())
        yield plan[match.start() : end if end > 0 else len(plan)].decode("utf-8", "replace")


def _capabilities(text: str) -> tuple[str, ...]:
    found = re.search(r"accelerators=\{([^}]*)\}", text)
    names = re.findall(r"sm(\d+)(\d)", found[1]) if found else []
    return tuple(f"{int(major)}.{minor}" for major, minor in names)


def _sizes(descriptors: str) -> Iterator[tuple[str, int]]:
    """Bytes of each tensor, and of each part of one that a kernel is given."""
    for line in descriptors.splitlines():
        name, dims, kind = (re.search(p, line) for p in (r'name="([^"]+)"', r"dims=\{([^}]*)\}", r" type=(\w+)"))
        if name and dims and kind:
            yield name[1], math.prod(map(int, dims[1].split())) * _BITS.get(kind[1], 8) // 8


def _kernels(main: str, sizes: Mapping[str, int]) -> Iterator[Kernel]:
    for kind, body in re.findall(r"^  (\w+)=\{ (.*)", main, re.M):
        if kind in _HOST:
            continue
        name = re.search(r'\bname="?([^"\s]+)', body)
        used = [n for key in ("input_args", "output_args", "input", "output") for n in _names(body, key)]
        nodes = re.findall(r"\[ONNX Layer: ([^\]]+)\]", body)
        yield Kernel(kind, name[1] if name else kind, sum(sizes.get(n, 0) for n in used), tuple(nodes))


def _names(body: str, key: str) -> list[str]:
    found = re.search(rf"(?<!\w){key}=\{{([^}}]*)\}}", body)
    return re.findall(r'"([^"]+)"', found[1]) if found else []
