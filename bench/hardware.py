"""What a measurement ran on, without which its figures say nothing."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from modpass.version import __version__

__all__ = ["Hardware", "command_line", "hardware", "no_gpu", "versions"]

_PACKAGES = ("torch", "onnx", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "transformers")


@dataclass(frozen=True)
class Hardware:
    """CPU model, cores this process may use, threads torch uses, GPU (None: there is none), system."""

    cpu: str
    cores: int
    threads: int
    gpu: str | None
    system: str


def hardware() -> Hardware:
    """This machine.

    >>> hardware().cores > 0
    True
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    system = f"{platform.system()} {platform.machine()}"
    return Hardware(_cpu_model(), cores, torch.get_num_threads(), _gpu(), system)


def versions() -> dict[str, str]:
    """Versions of Python, modpass and of those packages a runner may use that are installed.

    >>> sorted(versions())[:1]
    ['modpass']
    """
    found = {"python": platform.python_version(), "modpass": __version__}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def command_line(arguments: Sequence[str] | None = None) -> str:
    """The command that started this process, quoted for a shell, without the folder of its program.

    >>> command_line(["/usr/bin/modpass", "bench", "a model"])
    "modpass bench 'a model'"
    """
    program, *rest = sys.argv if arguments is None else arguments
    return shlex.join([Path(program).name, *rest])


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()


def _gpu() -> str | None:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def no_gpu() -> str | None:
    """Why nothing runs on a GPU here; None if it does.

    >>> no_gpu() in (None, "no NVIDIA GPU")
    True
    """
    return None if torch.cuda.is_available() else "no NVIDIA GPU"
