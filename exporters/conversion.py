"""A model with fixed shapes -> an ONNX graph, and for each routed block the value that holds its choices."""

from __future__ import annotations

from typing import Literal

import onnx_ir as ir
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from modpass.errors import ExportError, InputError
from modpass.exporters.lowering import lower
from modpass.exporters.origins import note_origins
from modpass.exporters.precision import to_precision
from modpass.exporters.shapes import FixedShape, example_tensors
from modpass.exporters.static_graph import name_values, prove_static, strip, take_choices
from modpass.model import RoutedModel
from modpass.record import evaluated
from modpass.routing import recorded_choices

__all__ = ["Precision", "as_onnx"]

Precision = Literal["float32", "float16", "bfloat16"]
_OPSETS = range(18, 21)


class _Flat(nn.Module):
    """The model as a function of tensors alone: user outputs first, then each routed block's choices."""

    def __init__(self, model: RoutedModel, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        with recorded_choices() as choices:
            output = self.model(**dict(zip(self.names, tensors, strict=True)))
        leaves = [v for v in pytree.tree_leaves(output) if isinstance(v, Tensor)]
        return (*leaves, *(choices[n] for n in self.model.routed_blocks))


def as_onnx(
    model: RoutedModel, shape: FixedShape, opset: int = 18, dtype: Precision | None = None
) -> tuple[ir.Model, dict[str, str]]:
    """The ONNX graph of ``model``, and for each routed block the name of the value that holds its choices.

    Raises:
        InputError, ExportError: as ``export_onnx``.
    """
    if not isinstance(shape, FixedShape):
        raise InputError(f"shape is a {type(shape).__name__}; give a FixedShape(batch, sequence)")
    if opset not in _OPSETS:
        raise InputError(f"opset is {opset}; allowed are {_OPSETS.start} to {_OPSETS.stop - 1}")
    if dtype not in (None, "float32", "float16", "bfloat16"):
        raise InputError(f"dtype is {dtype!r}; allowed are 'float32', 'float16' and 'bfloat16'")
    stochastic = [n for n, b in model.routed_blocks.items() if b.selection == "stochastic"]
    if stochastic:
        raise ExportError(
            f"block '{stochastic[0]}' selects by noise (selection='stochastic'), which no fixed graph "
            "repeats; transform with selection='expert_choice' to export"
        )
    tensors = example_tensors(model, shape)
    with evaluated(model):
        graph = lower(_Flat(model, list(tensors)).eval(), tensors, opset)
    name_values(graph, model, list(tensors))
    indices = take_choices(graph, list(model.routed_blocks))
    note_origins(graph, model)
    strip(graph)
    prove_static(graph)
    if dtype in ("float16", "bfloat16"):
        graph = to_precision(graph, dtype, choices=list(indices.values()))
    return graph, indices
