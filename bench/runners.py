"""The ways to run a model, behind one protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from modpass import RoutedModel
from modpass.bench.onnx_runners import OnnxCpuRunner, OnnxCudaRunner
from modpass.bench.tensorrt_runner import TensorRTRunner
from modpass.bench.torch_runner import Call, TorchRunner
from modpass.errors import InputError

__all__ = ["RUNNERS", "Runner", "runners_named"]


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


RUNNERS: dict[str, Runner] = {
    runner.name: runner
    for runner in (
        TorchRunner("torch"),
        TorchRunner("torch-compile", compiled=True),
        OnnxCpuRunner(),
        TorchRunner("torch-cuda", device="cuda"),
        TorchRunner("torch-compile-cuda", device="cuda", compiled=True),
        OnnxCudaRunner(),
        TensorRTRunner("tensorrt"),
        TensorRTRunner("tensorrt-rtx"),
    )
}


def runners_named(names: Sequence[str] | None = None) -> tuple[Runner, ...]:
    """The runners of these names, in this order; all for None.

    Raises:
        InputError: no runner has one of the names.

    >>> [runner.name for runner in runners_named(["onnxruntime"])]
    ['onnxruntime']
    """
    unknown = [name for name in names or () if name not in RUNNERS]
    if unknown:
        raise InputError(f"no runner is called '{unknown[0]}'; there are: {', '.join(RUNNERS)}")
    return tuple(RUNNERS[name] for name in (RUNNERS if names is None else names))
