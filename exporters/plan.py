"""A TensorRT plan is code that the GPU's driver runs: nothing deserialises one that was not checked here first."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from modpass.errors import StateError, VerificationError
from modpass.exporters.decoder_manifest import Ports
from modpass.exporters.manifest import Manifest, manifest_path
from modpass.exporters.trt_api import TensorRT, find

__all__ = ["CheckedPlan", "check_target", "checked_plan", "read_plan"]


@dataclass(frozen=True)
class CheckedPlan:
    """The bytes of an engine as they were hashed, and its manifest; ``checked_plan`` makes it."""

    path: Path
    content: bytes
    manifest: Manifest

    @property
    def ports(self) -> Ports:
        """The shapes of what the engine takes and returns, as its manifest has them."""
        inputs, outputs = ({s.name: s.shape for s in specs} for specs in (self.manifest.inputs, self.manifest.outputs))
        return Ports(inputs, outputs)


def checked_plan(path: Path, tensorrt: TensorRT, capability: str | None, again: str | None = None) -> CheckedPlan:
    """Read an engine that is whole, of this TensorRT and for this GPU.

    The bytes that are hashed are the bytes that are returned, so that nothing can change in between.

    Args:
        path: the engine; its manifest lies beside it.
        tensorrt: what will deserialise it.
        capability: the GPU's; None leaves it unchecked.
        again: how to build it again.

    Raises:
        StateError: the engine or its manifest is missing, or it was built for something else.
        VerificationError: it has changed.

    >>> checked_plan(Path("absent.engine"), tensorrt=None, capability=None)
    Traceback (most recent call last):
    modpass.errors.StateError: 'absent.engine' is missing; build it again with: modpass build
    """
    again = again or "build it again with: modpass build"
    if not path.is_file() or not manifest_path(path).is_file():
        raise StateError(f"'{manifest_path(path) if path.is_file() else path}' is missing; {again}")
    built = Manifest.load(manifest_path(path))
    check_target(path, built, tensorrt.flavor.name, tensorrt.version, capability, again)
    return CheckedPlan(path, read_plan(path, built, again), built)


def read_plan(path: Path, built: Manifest, again: str = "build it again") -> bytes:
    """The bytes of an engine, if they are those that its manifest was written for.

    Raises:
        VerificationError: they are not, or cannot be read.
    """
    try:
        size = path.stat().st_size
        if size != built.bytes:
            raise VerificationError(f"'{path}' has {size} bytes, its manifest says {built.bytes}; {again}")
        content = path.read_bytes()
    except OSError as e:
        raise VerificationError(f"'{path}' cannot be read: {e}; {again}") from e
    if hashlib.sha256(content).hexdigest() != built.sha256:
        raise VerificationError(f"'{path}' is not the file its manifest was written for: its SHA-256 differs; {again}")
    return content


def check_target(
    path: Path, built: Manifest, flavor: str, version: str | None, capability: str | None, again: str
) -> None:
    """Compare what an engine was built for with what would run it; None leaves version or GPU unchecked.

    Raises:
        StateError: they differ.
    """
    if built.kind != "engine" or built.flavor != flavor:
        raise StateError(f"'{path}' is of {built.flavor or built.kind}, not of {flavor}; {again}")
    facts = find(flavor)
    own = built.versions.get(facts.module)
    if own is None or own != (version or own):
        raise StateError(
            f"'{path}' was built by {facts.title} {own or 'of an unknown version'}, this is {version or 'unknown'}, "
            f"and a plan is read by its own version alone; {again}"
        )
    if capability is not None and capability not in built.compute_capabilities:
        found = " and ".join(built.compute_capabilities) or "an unknown one"
        raise StateError(f"'{path}' was built for compute capability {found}, this GPU has {capability}; {again}")
