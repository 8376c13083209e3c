"""What a user may ask of a TensorRT build, and what each flavour has no part of."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from modpass.errors import BuildError, InputError
from modpass.exporters.trt_api import Flavor, TensorRT
from modpass.files import whole_file

__all__ = ["BuildOptions", "Verbosity"]

Verbosity = Literal["none", "layer_names_only", "detailed"]


@dataclass(frozen=True)
class BuildOptions:
    """Options of ``build_engine``; None keeps TensorRT's own value."""

    level: int | None = None
    workspace: int | None = None
    cache: str | os.PathLike[str] | None = None
    verbosity: str | None = None
    refit: bool = False
    strip: bool = False

    def check(self, facts: Flavor) -> None:
        """Refuse what is out of range, and what the flavour does not have.

        Raises:
            InputError: a value is not allowed, or has no effect.
            BuildError: it needs a GPU, and there is none.
        """
        if self.level is not None and self.level not in range(6):
            raise InputError(f"optimization_level is {self.level}, allowed are 0 to 5")
        if self.workspace is not None and self.workspace <= 0:
            raise InputError(f"workspace_bytes is {self.workspace}, it must be a positive number of bytes")
        if self.verbosity is not None and self.verbosity not in get_args(Verbosity):
            raise InputError(f"profiling_verbosity is '{self.verbosity}', allowed are {', '.join(get_args(Verbosity))}")
        if self.cache is not None and facts.capabilities:
            raise InputError(
                f"timing_cache has no effect in {facts.title}, which picks kernels at load time; leave it out"
            )
        if (self.refit or self.strip) and facts.capabilities and not torch.cuda.is_available():
            option = "strip_weights" if self.strip else "refit"
            raise BuildError(
                f"{option} needs an NVIDIA GPU while {facts.title} builds, and PyTorch sees none; build on a machine "
                f"with one, or leave {option} out"
            )

    def apply(self, trt: TensorRT, config: Any) -> Any:
        """Set what was given; returns the timing cache, if there is one.

        Raises:
            BuildError: TensorRT refuses the cache, or has no such flag.
        """
        if self.level is not None:
            config.builder_optimization_level = self.level
        if self.workspace is not None:
            trt.workspace(config, self.workspace)
        if self.verbosity is not None:
            trt.verbosity(config, self.verbosity)
        for flag in (*(["REFIT"] if self.refit else []), *(["STRIP_PLAN"] if self.strip else [])):
            trt.flag(config, flag)
        if self.cache is None:
            return None
        known = Path(self.cache)
        return trt.timing_cache(config, known.read_bytes() if known.exists() else b"")

    def save(self, cache: Any) -> None:
        """Write the timing cache back."""
        content = cache.serialize()
        if self.cache is not None and content is not None:
            with whole_file(self.cache) as temporary:
                temporary.write_bytes(memoryview(content))
