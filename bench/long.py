"""A sequence beyond TensorRT's TopK: export, compare with PyTorch in ONNX Runtime, build an engine.

``modpass study long [SEQUENCE]`` prints a table; 65,536 tokens, its default, need 3 GB of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple, TypeVar

import torch

import modpass
from modpass.bench.study_model import StudyDecoder
from modpass.exporters import FixedShape, VerificationReport, build_engine, export_onnx, verify

__all__ = ["SEQUENCE", "LongRow", "long_model", "measure_long"]

T = TypeVar("T")
SEQUENCE, CAPACITY, BLOCKS, WIDTH = 65_536, 0.125, 2, 64


class Seconds(NamedTuple):
    """Of a clock, and of this process on the CPU: what else the machine does shows in the first alone."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        """``3.2 s (3.1 s of CPU time)``."""
        return f"{self.wall:.1f} s ({self.cpu:.1f} s of CPU time)"


@dataclass(frozen=True)
class LongRow:
    """What one sequence length took, and how far ONNX Runtime is from PyTorch."""

    sequence: int
    k: int
    selector: str
    export: Seconds
    onnx_bytes: int
    parity: VerificationReport
    build: Seconds
    engine_bytes: int
    capturable: bool

    def __str__(self) -> str:
        """Rows of a markdown table."""
        worst = max(d.max_rel for d in self.parity.outputs)
        rows = {
            "tokens, of them chosen in each block": f"{self.sequence:,}, {self.k:,}",
            "selector": self.selector,
            "export": f"{self.export}, {self.onnx_bytes / 1e6:.2f} MB",
            "largest relative difference to PyTorch": f"{worst:.1e}",
            "equal token choices": f"{min(self.parity.choices.values()):.2%}",
            "TensorRT-RTX build": f"{self.build}, {self.engine_bytes / 1e6:.2f} MB",
            "one CUDA graph can hold it": "yes" if self.capturable else "no",
        }
        return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def long_model() -> modpass.RoutedModel:
    """A small decoder, each of its blocks routed: an unrouted one would hold attention of the whole sequence, 17 GB
    per head at 65,536 tokens.

    >>> list(long_model().routed_blocks)
    ['blocks.0', 'blocks.1']
    """
    torch.manual_seed(0)
    model = StudyDecoder(WIDTH, BLOCKS).eval()
    example = (torch.zeros(2, 11, dtype=torch.int64),)
    routed = modpass.mod_transform(model, CAPACITY, every=1, gate="sigmoid", example_inputs=example)
    for block in routed.routed_blocks.values():
        torch.nn.init.normal_(block.router.weight)
    return routed


def measure_long(sequence: int, folder: Path, tell: Callable[[str, int, int], Any] = lambda *_: None) -> LongRow:
    """Export ``long_model`` at ``sequence`` tokens into ``folder``, verify it and build its TensorRT-RTX engine.

    Raises:
        ModpassError: a step failed, or ONNX Runtime computes something else.
    """
    model, path, engine = long_model(), folder / "long.onnx", folder / "long.engine"
    tell("exporting", 0, 3)
    manifest, export = _timed(lambda: export_onnx(model, path, FixedShape(1, sequence)))
    tell("comparing with PyTorch", 1, 3)
    parity = verify(model, path).check()
    tell("building an engine", 2, 3)
    built, build = _timed(lambda: build_engine(path, engine, progress=False))
    first = next(iter(manifest.routed_blocks.values()))
    capturable = b"stream_capturable=1" in engine.read_bytes()
    size = path.stat().st_size
    return LongRow(sequence, first.k, str(first.selector), export, size, parity, build, built.bytes or 0, capturable)


def _timed(work: Callable[[], T]) -> tuple[T, Seconds]:
    wall, cpu = perf_counter(), process_time()
    made = work()
    return made, Seconds(perf_counter() - wall, process_time() - cpu)
