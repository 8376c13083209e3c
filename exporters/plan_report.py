"""What an engine will do on a GPU: kernels, memory, bytes moved, and whether a CUDA graph can hold it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from modpass.errors import BuildError, StateError
from modpass.exporters import trt_api
from modpass.exporters.engine import Engine
from modpass.exporters.manifest import Manifest, manifest_path
from modpass.exporters.myelin import Kernel, program
from modpass.exporters.plan import checked_plan, read_plan

__all__ = ["PlanReport", "inspected", "plan_report"]


@dataclass(frozen=True)
class PlanReport:
    """What is known of an engine; ``moved_bytes`` and ``capturable`` are None where the engine does not tell.

    source: ``"plan text"``, read without a GPU, or ``"engine inspector"``.
    """

    engine: str
    source: str
    compute_capabilities: tuple[str, ...]
    routed_blocks: int
    file_bytes: int
    kernels: tuple[Kernel, ...]
    device_memory: int
    moved_bytes: int | None
    capturable: bool | None


def plan_report(path: str | os.PathLike[str]) -> PlanReport:
    """Report an engine of ``build_engine``: from the text of a TensorRT-RTX plan, else from the GPU it was built for.

    Raises:
        StateError: the engine or its manifest is missing or not what it says; or it needs a GPU, and there is none.
        VerificationError: the engine has changed.

    >>> plan_report("absent.engine")
    Traceback (most recent call last):
    modpass.errors.StateError: there is no manifest 'absent.engine.json'; export_onnx and build_engine write it
    """
    file = Path(path)
    manifest = Manifest.load(manifest_path(file))
    if manifest.kind != "engine":
        raise StateError(f"'{file}' is an {manifest.kind.upper()} file; give an engine of 'modpass build'")
    content = read_plan(file, manifest)
    if manifest.flavor != "tensorrt-rtx":
        return inspected(file)
    found = program(content)
    return PlanReport(
        file.name, "plan text", found.capabilities, len(manifest.routed_blocks), len(content), found.kernels,
        found.device_memory, found.bytes, found.capturable,
    )  # fmt: skip


def inspected(path: str | os.PathLike[str]) -> PlanReport:
    """Report an engine by TensorRT's engine inspector, which needs the GPU that it was built for.

    Raises:
        StateError: there is no GPU, or the engine is for another one.
        VerificationError: the engine has changed.
        BuildError: TensorRT refuses it.
    """
    file = Path(path)
    manifest = Manifest.load(manifest_path(file))
    if not torch.cuda.is_available():
        raise StateError(f"only the GPU that '{file}' was built for can report it, and PyTorch sees none")
    tensorrt = trt_api.load(manifest.flavor or "")
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    plan = checked_plan(file, tensorrt, capability)
    engine = Engine(tensorrt, plan)
    kernels = tuple(Kernel("layer", name, 0, ()) for name in _layers(engine.inspect()))
    reason = engine.uncapturable(torch.cuda.current_stream().cuda_stream)
    capturable = None if reason is None and not tensorrt.flavor.capabilities else reason is None  # RTX alone can tell
    return PlanReport(
        file.name, "engine inspector", manifest.compute_capabilities, len(manifest.routed_blocks), len(plan.content),
        kernels, engine.scratch_bytes, None, capturable,
    )  # fmt: skip


def _layers(text: str) -> list[str]:
    """Layer names in what the inspector says: texts, or objects where the engine was built with "detailed".

    Raises:
        BuildError: it is no JSON of that form.
    """
    try:
        found = json.loads(text)["Layers"]
        return [layer if isinstance(layer, str) else str(layer["Name"]) for layer in found]
    except (ValueError, KeyError, TypeError) as e:
        raise BuildError(f"the engine inspector gave no list of layers: {e}") from e
