"""What other tools make of the dense model for ONNX Runtime: the plain exporter, and ONNX Runtime's own optimiser."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modpass.bench.measuring import Original
from modpass.errors import VerificationError, require

__all__ = ["check_same", "optimised", "plain_export"]

# Of ONNX Runtime's optimiser, the kind of model that a Hugging Face model type is near to; else its default.
_KINDS = ("bart", "bert", "clip", "gpt2", "gpt_neox", "phi", "t5", "vit")


def plain_export(original: Original, inputs: Mapping[str, Tensor], folder: Path) -> Path:
    """The original model through ``torch.onnx.export`` as anybody would call it, at the shape of ``inputs``.

    Source: ``torch.onnx.export`` of the installed torch, with its own defaults.
    """
    path = folder / "plain.onnx"
    if not path.exists():
        with _quiet(), torch.no_grad():
            torch.onnx.export(
                original.model, (), path, kwargs={**inputs, **original.constants}, dynamo=True, verbose=False
            )
    return path


def optimised(original: Original, plain: Path) -> Path:
    """``plain`` through ``onnxruntime.transformers.optimizer``, which fuses attention, norms and activations.

    Source: ``onnxruntime.transformers.optimizer.optimize_model``.

    Raises:
        MissingExtraError: this build of ONNX Runtime comes without it.
    """
    path = plain.with_name("optimised.onnx")
    if not path.exists():
        optimizer = require("onnxruntime.transformers.optimizer", "bench")
        kind = getattr(getattr(original.model, "config", None), "model_type", None)
        with _quiet():
            model = optimizer.optimize_model(
                str(plain), model_type=kind if kind in _KINDS else "bert", num_heads=0, hidden_size=0
            )
            model.save_model_to_file(str(path), use_external_data_format=True)
    return path


def check_same(name: str, found: Any, ours: Any) -> None:
    """Refuse a peer that computes something else than our dense model does.

    Raises:
        VerificationError: their first outputs differ by more than rounding.

    >>> check_same("peer", [np.zeros(2)], [np.ones(2)])
    Traceback (most recent call last):
    modpass.errors.VerificationError: 'peer' computes something else: its first output is off by 1 ...
    """
    theirs, mine = (np.asarray(outputs[0], dtype=np.float32) for outputs in (found, ours))
    scale = max(1.0, float(np.abs(mine).max(initial=0)))
    off = float(np.abs(theirs - mine).max(initial=0)) if theirs.shape == mine.shape else float("inf")
    if not off <= 0.02 * scale:
        raise VerificationError(
            f"'{name}' computes something else: its first output is off by {off:g} where ours reaches {scale:g}; "
            "its time says nothing"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the notes of exporters and optimisers on their own workings off the user's terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
