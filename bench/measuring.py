"""One row of a benchmark: prepare, weigh and time a dense and a routed model under one runner.

It needs torch alone, so that a machine without the exporters' packages can measure what it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor, nn

from modpass import RoutedModel
from modpass.bench.flops import FlopCount, count_flops
from modpass.bench.hardware import command_line, hardware, versions
from modpass.bench.result import Measurement, Peer, Result, Row
from modpass.bench.timing import Timing, interleave, synchronize_gpu
from modpass.errors import InputError

if TYPE_CHECKING:
    from modpass.bench.variants import Variants

__all__ = [
    "Call",
    "HasPeers",
    "Original",
    "Plan",
    "Profiles",
    "Progress",
    "Runner",
    "begin",
    "first_line",
    "measure",
]

Progress = Callable[[str, int, int], None]
Call = Callable[[], object]


@dataclass(frozen=True)
class Plan:
    """How long to measure: dropped rounds, rounds at least, seconds of calls at least per runner.

    peers: also measure what other tools make of the dense model; blocks: also measure the time in each block.
    """

    warmup: int = 3
    repeats: int = 20
    min_seconds: float = 0.0
    peers: bool = False
    blocks: bool = False


@dataclass(frozen=True)
class Original:
    """The model as it was before any trace, and what its call needs beside tensors (``use_cache=False``)."""

    model: nn.Module
    constants: Mapping[str, object]


def begin(variants: Variants, name: str, inputs: Mapping[str, Tensor], command: str | None = None) -> Result:
    """A result without rows: the case, its counted operations, and what this runs on.

    Raises:
        InputError: the model does not run on ``inputs``.
    """
    dense_flops, routed_flops = _counted(variants, inputs)
    return Result(
        case=variants.case,
        name=name,
        rows=(),
        dense_flops=dense_flops,
        routed_flops=routed_flops,
        inputs={name: tuple(tensor.shape) for name, tensor in inputs.items()},
        hardware=hardware(),
        versions=versions(),
        command=command_line() if command is None else command,
    )


def _counted(variants: Variants, inputs: Mapping[str, Tensor]) -> tuple[FlopCount, FlopCount]:
    """Operations of both; the first time that the model meets the shape of the case."""
    blocks = variants.routed.routed_blocks
    try:
        return count_flops(variants.dense, inputs, blocks), count_flops(variants.routed, inputs, blocks)
    except (RuntimeError, IndexError, TypeError, ValueError) as e:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
        raise InputError(f"the model does not run on {shapes}: {first_line(e)}") from e


@runtime_checkable
class Runner(Protocol):
    """One way to run a model on fixed inputs."""

    @property
    def name(self) -> str:
        """The name in reports and on the command line."""

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda"``; on ``"cuda"`` the clock waits for the device."""

    def available(self) -> str | None:
        """None if it can run here, else the reason why not."""

    def prepare(self, model: RoutedModel, inputs: Mapping[str, Tensor], workdir: Path) -> Call:
        """Do what is done once (export, build, compile), and return the call to be timed.

        ``workdir`` is kept between the runners of one model: what one exported, the next finds.
        """

    def peak_bytes(self, call: Call) -> int | None:
        """Memory that the first call after :meth:`prepare` takes at most; None: unknown."""


@runtime_checkable
class HasPeers(Protocol):
    """A runner that can also run what other tools make of the original, so that our dense is no straw man."""

    def peers(
        self, original: Original, inputs: Mapping[str, Tensor], workdir: Path, dense: Call
    ) -> Mapping[str, Callable[[], Call]]:
        """What prepares each peer, by name; it raises where the peer cannot run or computes something else."""


@runtime_checkable
class Profiles(Protocol):
    """A runner that can tell where the time of a call goes."""

    def block_seconds(
        self, model: RoutedModel, inputs: Mapping[str, Tensor], workdir: Path, blocks: Collection[str]
    ) -> Mapping[str, float]:
        """Seconds of one call in each of ``blocks``; under ``""`` those outside of them."""


def measure(
    runner: Runner,
    models: Mapping[str, RoutedModel],
    inputs: Mapping[str, Tensor],
    workdir: Path,
    plan: Plan,
    progress: Progress,
    original: Original | None = None,
    blocks: Collection[str] = (),
) -> Row:
    """One row: prepare ``models["dense"]`` and ``models["routed"]``, then their memory, then their times.

    Peers of the dense model take turns with both where ``plan`` asks for them and ``original`` is given. A runner
    that is not available gives a skipped row, one that raises a failed row; both say why.
    """
    if reason := runner.available():
        return Row(runner.name, "skipped", reason=reason)
    try:
        return _Measuring(runner, inputs, workdir, plan, progress).row(models, original, blocks)
    except Exception as e:  # one runner's fault must not cost the rows of the others
        return Row(runner.name, "failed", reason=f"{type(e).__name__}: {first_line(e)}")


class _Measuring:
    """The calls of one row, how much memory each takes, and what failed."""

    def __init__(
        self, runner: Runner, inputs: Mapping[str, Tensor], workdir: Path, plan: Plan, progress: Progress
    ) -> None:
        self.runner, self.inputs, self.workdir, self.plan, self.progress = runner, inputs, workdir, plan, progress
        self.calls: dict[str, Call] = {}
        self.peaks: dict[str, int | None] = {}

    def row(self, models: Mapping[str, RoutedModel], original: Original | None, blocks: Collection[str]) -> Row:
        for name, model in models.items():
            self.progress(f"{self.runner.name}: preparing {name}", 0, 0)
            self._add(name, self.runner.prepare(model, self.inputs, self._folder(name)))
        failed = {} if original is None or not self.plan.peers else self._add_peers(original)
        timings = self._times()
        found = {name: Measurement(timing, self.peaks[name]) for name, timing in timings.items()}
        for name, model in models.items():
            found[name] = replace(found[name], blocks=self._block_seconds(name, model, blocks))
        peers = [Peer(n, measurement) for n, measurement in found.items() if n not in models]
        peers += [Peer(n, reason=reason) for n, reason in failed.items()]
        return Row(self.runner.name, "measured", found["dense"], found["routed"], peers=tuple(peers))

    def _folder(self, name: str) -> Path:
        folder = self.workdir / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _add(self, name: str, call: Call) -> None:
        self.calls[name], self.peaks[name] = call, self.runner.peak_bytes(call)

    def _add_peers(self, original: Original) -> dict[str, str]:
        """Add the calls of the peers that run; the others' reasons."""
        if not isinstance(self.runner, HasPeers):
            return {}
        failed = {}
        makers = self.runner.peers(original, self.inputs, self._folder("peers"), self.calls["dense"])
        for name, make in makers.items():
            self.progress(f"{self.runner.name}: preparing {name}", 0, 0)
            try:
                self._add(name, make())
            except Exception as e:  # of another tool, which must not cost our own row
                failed[name] = f"{type(e).__name__}: {first_line(e)}"
        return failed

    def _times(self) -> dict[str, Timing]:
        plan = self.plan
        return interleave(
            self.calls,
            plan.warmup,
            plan.repeats,
            plan.min_seconds,
            progress=lambda done, expected: self.progress(f"{self.runner.name}: measuring", done, expected),
            synchronize=synchronize_gpu if self.runner.device == "cuda" else None,
        )

    def _block_seconds(self, name: str, model: RoutedModel, blocks: Collection[str]) -> Mapping[str, float]:
        if not (self.plan.blocks and blocks and isinstance(self.runner, Profiles)):
            return {}
        self.progress(f"{self.runner.name}: time by block, {name}", 0, 0)
        return self.runner.block_seconds(model, self.inputs, self._folder(name), blocks)


def first_line(error: Exception) -> str:
    """The first line of an error's message, without colours.

    >>> first_line(ValueError("too long\\nand more"))
    'too long'
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    return next(iter(plain.splitlines()), "no message")
