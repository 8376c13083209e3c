"""Sizes of a trace back into graph nodes."""

from __future__ import annotations

import math

import pytest
import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import CeilToInt, FloatTrueDiv, FloorToInt, RoundToInt, ToFloat, TruncToInt

from modpass.symbols import emit


@pytest.mark.parametrize(
    ("rounding", "wanted"),
    [(CeilToInt, math.ceil), (FloorToInt, math.floor), (TruncToInt, math.trunc), (RoundToInt, round)],
)
def test_a_size_that_is_rounded_is_rounded_in_the_graph(rounding: type, wanted: object) -> None:
    s = sympy.Symbol("s", positive=True, integer=True)
    graph = fx.Graph()
    size = graph.placeholder("size")
    graph.output(emit(graph, rounding(FloatTrueDiv(ToFloat(s) - 0.5, 4.0)) + 1, {s: size}))
    compute = fx.GraphModule(torch.nn.Module(), graph)
    for number in range(1, 20):
        found = compute(number)
        assert isinstance(found, int)
        assert found == wanted((number - 0.5) / 4) + 1  # type: ignore[operator]
