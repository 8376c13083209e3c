"""The ways to run a model, by name."""

from __future__ import annotations

from collections.abc import Sequence

from modpass.bench.measuring import Runner
from modpass.bench.onnx_runners import OnnxCpuRunner, OnnxGpuRunner
from modpass.bench.tensorrt_runner import TensorRTRunner
from modpass.bench.torch_runner import TorchRunner
from modpass.errors import InputError

__all__ = ["RUNNERS", "Runner", "runners_named"]


RUNNERS: dict[str, Runner] = {
    runner.name: runner
    for runner in (
        TorchRunner("torch"),
        TorchRunner("torch-compile", compiled=True),
        OnnxCpuRunner(),
        TorchRunner("torch-cuda", device="cuda"),
        TorchRunner("torch-compile-cuda", device="cuda", compiled=True),
        TorchRunner("torch-graphs-cuda", device="cuda", compiled=True, graphs=True),
        OnnxGpuRunner("onnxruntime-cuda", "CUDAExecutionProvider"),
        OnnxGpuRunner("onnxruntime-tensorrt", "TensorrtExecutionProvider"),
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
