"""Imported once by the server that every model's process forks from.

Importing is not enough: half of what the first export of a process takes goes into tables that it makes on the way.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

from modpass.bench.coverage_stages import run_stages
from modpass.bench.offline import transformers_offline

__all__ = ["warm_up"]


def warm_up() -> None:
    """Take one small model as far as ONNX, and import what comes after."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers_offline("hf").logging.set_verbosity_error()
    run_stages("other", "torch-encoder", "onnx", _nobody)
    for name in ("onnxruntime", "tensorrt_rtx"):
        try:
            importlib.import_module(name)
        except ImportError:  # said by the stage that needs it
            continue


def _nobody(kind: str, value: Any) -> None:
    """Report to no one."""


warm_up()
