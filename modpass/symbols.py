"""Sizes of traced values as sympy expressions, and back into graph nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import OptimizedPythonReferenceAnalysis

__all__ = ["Expr", "emit", "expr_of", "hint_of", "shape_of", "traced_value", "value_of"]

Expr: TypeAlias = Any  # sympy ships no types


def expr_of(size: Any) -> Expr:
    """The expression of an int or SymInt.

    >>> expr_of(3)
    3
    """
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def value_of(node: fx.Node) -> Any:
    """What the trace recorded for a node: a fake tensor, a SymInt or None."""
    return node.meta.get("val")


def shape_of(value: Any) -> tuple[Expr, ...]:
    """The shape of a recorded tensor as expressions; empty for anything else.

    >>> shape_of(torch.zeros(2, 3))
    (2, 3)
    """
    return tuple(map(expr_of, value.shape)) if isinstance(value, torch.Tensor) else ()


def traced_value(mode: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the trace would have recorded for a call: run on the recorded values, sizes left open."""
    with mode, enable_python_dispatcher():
        return target(*fx.map_arg(args, value_of), **fx.map_arg(kwargs, value_of))


def hint_of(size: Any) -> int | None:
    """The number that a size had in the example inputs.

    >>> hint_of(3)
    3
    """
    if isinstance(size, int):
        return size
    hint: int | None = size.node.hint
    return hint


class _Rounding(OptimizedPythonReferenceAnalysis):
    """torch's own leaves the rounding of a size that is yet to be known out."""

    @staticmethod
    def ceil_to_int(x: Any, dtype: Any) -> Any:
        return _rounded(math.ceil, x)

    @staticmethod
    def floor_to_int(x: Any, dtype: Any) -> Any:
        return _rounded(math.floor, x)

    @staticmethod
    def trunc_to_int(x: Any, dtype: Any) -> Any:
        return _rounded(math.trunc, x)

    @staticmethod
    def round_to_int(x: Any, dtype: Any) -> Any:
        return _rounded(round, x)


def _rounded(how: Any, x: Any) -> Any:
    return x.tracer.create_proxy("call_function", how, (x,), {}) if isinstance(x, fx.Proxy) else how(x)


def emit(graph: fx.Graph, expr: Expr, known: Mapping[Expr, fx.Node]) -> fx.Node | int:
    """Add nodes that compute ``expr`` from the symbols in ``known``, at the graph's insert point.

    >>> emit(fx.Graph(), sympy.Integer(4), {})
    4
    """
    if expr.is_Integer:
        return int(expr)
    if expr in known:
        return known[expr]
    env = {symbol: fx.Proxy(node) for symbol, node in known.items() if symbol in expr.free_symbols}
    result: Any = sympy_interp(_Rounding, env, expr)
    return result.node if isinstance(result, fx.Proxy) else int(result)
