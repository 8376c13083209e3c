"""A torch module and the tensors it takes -> the ONNX graph that torch's exporter makes of it, quietly."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from modpass.errors import ExportError
from modpass.exporters.attention_ranks import ExportableAttention
from modpass.exporters.masked_rows import zero_rows_late

__all__ = ["lower", "quiet"]


def lower(module: nn.Module, tensors: Mapping[str, Tensor], opset: int, outputs: Sequence[str] = ()) -> ir.Model:
    """The ONNX graph of a module that takes these tensors in order; ``outputs``: names for what it returns.

    Raises:
        ExportError: torch cannot lower it.
    """
    names: dict[str, Any] = {"input_names": list(tensors), "output_names": list(outputs)} if outputs else {}
    try:
        with quiet(), torch.no_grad(), ExportableAttention():
            program = torch.onnx.export(
                module,
                tuple(tensors.values()),
                dynamo=True,
                opset_version=opset,
                external_data=False,
                verbose=False,
                **names,
            )
    except Exception as e:
        sizes = ", ".join(f"{n} {list(t.shape)}" for n, t in tensors.items())
        raise ExportError(f"torch cannot lower this model at {sizes}, opset {opset}: {_cause(e)}") from e
    assert program is not None
    zero_rows_late(program.model)
    return program.model


def _cause(error: BaseException) -> str:
    """The first line of the error that all others followed from."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return next((line for line in plain.splitlines() if line.strip()), type(error).__name__)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporter's notes on its own workings off the user's terminal."""
    logs = [
        logging.getLogger(name)
        for name in ("torch", "torch.onnx", "torch._subclasses.fake_tensor", "onnxscript", "onnx_ir")
    ]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
