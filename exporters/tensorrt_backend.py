"""The engines that ``modpass build DIR`` writes beside the graphs of a decoder, run on a GPU."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from modpass.errors import VerificationError
from modpass.exporters import trt_api
from modpass.exporters.decoder_manifest import DecoderManifest
from modpass.exporters.device import Device, Layout
from modpass.exporters.device_backend import DeviceBackend
from modpass.exporters.engine import Engine
from modpass.exporters.manifest import Manifest, TensorSpec
from modpass.exporters.plan import CheckedPlan, checked_plan

__all__ = ["TensorRTBackend"]


class TensorRTBackend(DeviceBackend):
    """TensorRT or TensorRT-RTX: an execution context each for prefill and decode, on memory of torch.

    A step is one CUDA graph where its plan has no branches; ``uncaptured`` says why it is not.

    Args:
        flavor: ``"tensorrt-rtx"`` or ``"tensorrt"``.
        device: ``"cuda"``, ``"cuda:1"``; ``"cpu"`` is for engines that run there, which no TensorRT has.

    Raises:
        InputError: no such flavour, or no GPU.
        MissingExtraError: it is not installed.
    """

    def __init__(self, flavor: str = "tensorrt-rtx", device: str = "cuda") -> None:
        self.tensorrt = trt_api.load(flavor)
        super().__init__(Device(device, f"backend '{flavor}'"))

    def open(self, folder: Path, manifest: DecoderManifest) -> None:
        """Check both engines before either is deserialised; then as ``DeviceBackend``.

        Raises:
            StateError: one is missing, or built for another flavour, version or GPU; names the command that builds it.
            VerificationError: one has changed, or was not built from this folder's graph.
            BuildError: TensorRT refuses it.
        """
        self._plans = {name: self._checked(folder, name, manifest) for name in ("prefill", "decode")}
        manifest.match(self._plans["decode"].ports, self._plans["prefill"].ports)
        super().open(folder, manifest)

    def _checked(self, folder: Path, name: str, manifest: DecoderManifest) -> CheckedPlan:
        flavor, capability = self.tensorrt.flavor.name, self.device.capability
        wanted = f" --compute-capability {capability}" if capability else ""
        command = f"build it with: modpass build {shlex.quote(str(folder))} --flavor {flavor}{wanted}"
        plan = checked_plan(folder / f"{name}.engine", self.tensorrt, capability, command)
        if plan.manifest.onnx_sha256 != manifest.files[f"{name}.onnx"]:
            raise VerificationError(
                f"'{plan.path}' was built from another {name}.onnx than the one beside it; {command}"
            )
        return plan

    def load(self, folder: Path, name: str, manifest: DecoderManifest) -> _Loaded:
        """Deserialise one engine; see ``open``."""
        plan = self._plans.pop(name)
        return _Loaded(Engine(self.tensorrt, plan), plan.manifest, self.device)


class _Loaded:
    """An engine on the stream of a device; see ``Program``.

    Its inputs are those of the graph: TensorRT may leave out one that nothing reads, such as places without rotary.
    """

    def __init__(self, engine: Engine, built: Manifest, device: Device) -> None:
        self.engine, self.device = engine, device
        self.inputs, self.outputs = _layouts(built.inputs), engine.outputs

    @property
    def uncapturable(self) -> str | None:
        """Why a CUDA graph cannot hold a run."""
        return self.engine.uncapturable(self.device.handle)

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Bind memory by address."""
        self.engine.bind(tensors)

    def run(self) -> None:
        """Put one run on the stream."""
        self.engine.run(self.device.handle)


def _layouts(specs: tuple[TensorSpec, ...]) -> dict[str, Layout]:
    return {s.name: Layout(s.shape, getattr(torch, s.dtype)) for s in specs}
