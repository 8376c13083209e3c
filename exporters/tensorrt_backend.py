"""The engines that ``modpass build DIR`` writes beside the graphs of a decoder, run on a GPU."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from modpass.errors import StateError, VerificationError
from modpass.exporters import trt_api
from modpass.exporters.decoder_manifest import DecoderManifest
from modpass.exporters.device import Device, Layout
from modpass.exporters.device_backend import DeviceBackend
from modpass.exporters.engine import Engine
from modpass.exporters.manifest import Manifest, TensorSpec, manifest_path

__all__ = ["TensorRTBackend", "checked_engine"]


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

    def load(self, folder: Path, name: str, manifest: DecoderManifest) -> _Loaded:
        """Check and read one engine.

        Raises:
            StateError: it is missing, or built for another flavour or GPU; names the command that builds it.
            VerificationError: it is not the one that was built from this folder's graph.
            BuildError: TensorRT refuses it.
        """
        digest = manifest.files[f"{name}.onnx"]
        path, built = checked_engine(folder, name, digest, self.tensorrt.flavor.name, self.device.capability)
        return _Loaded(Engine(self.tensorrt, path), built, self.device)


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


def checked_engine(
    folder: Path, name: str, onnx_sha256: str, flavor: str, capability: str | None
) -> tuple[Path, Manifest]:
    """The engine of one graph and its manifest, if it is whole and was built from that graph for this GPU.

    capability: the GPU's; None leaves it unchecked.

    Raises:
        StateError: it is missing, or built for something else; names the command that builds it.
        VerificationError: the file has changed, or was built from another graph.
    """
    path = folder / f"{name}.engine"
    wanted = f" --compute-capability {capability}" if capability else ""
    command = f"build it with: modpass build {shlex.quote(str(folder))} --flavor {flavor}{wanted}"
    if not path.is_file() or not manifest_path(path).is_file():
        missing = manifest_path(path) if path.is_file() else path
        raise StateError(f"'{missing}' is missing; {command}")
    built = Manifest.load(manifest_path(path))
    if built.kind != "engine" or built.flavor != flavor:
        raise StateError(f"'{path}' is of {built.flavor or built.kind}, not of {flavor}; {command}")
    if built.onnx_sha256 != onnx_sha256:
        raise VerificationError(f"'{path}' was built from another {name}.onnx than the one beside it; {command}")
    if capability is not None and built.compute_capability != capability:
        raise StateError(
            f"'{path}' was built for compute capability {built.compute_capability}, this GPU has {capability}; "
            f"{command}"
        )
    built.check(path)
    return path, built
