"""Which operators keep tokens apart, and which mix them: the permission half of the pass.

A routed block runs on a subset of its tokens. That is right if tokens meet in attention alone, where a missing
token is a key that nobody sees. Everything else that looks along the sequence (convolutions, scans, pooling,
shifts) would silently compute something else, so it is refused. An operator not known here has to pass a
check on values (``modpass.check``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from modpass.symbols import Expr, shape_of, value_of
from modpass.tiling import tiles_apart

__all__ = ["LAYOUT", "MOVED", "SOFTMAX", "UNIFORM", "Unknown", "is_pointwise", "mixing_reason", "name_of"]

Reason = str | None
Carries = Callable[[Expr], bool]

# What moves the numbers of its one tensor about, and computes nothing.
LAYOUT = {
    "view", "reshape", "_unsafe_view", "transpose", "permute", "unsqueeze", "squeeze", "expand", "clone",
    "contiguous", "detach", "alias", "t", "mT", "movedim", "flatten", "unflatten", "repeat", "repeat_interleave",
    "slice",
}  # fmt: skip
# One value, laid out or rounded otherwise.
MOVED = LAYOUT | {"to", "_to_copy"}
_MOVES = MOVED | {
    "type_as", "numpy_T", "moveaxis", "swapaxes", "swapdims", "lift_fresh_copy", "dropout",
    "native_dropout", "view_as", "reshape_as", "expand_as", "float", "half", "view_as_complex", "view_as_real",
    "cat", "stack", "concat", "concatenate", "split", "split_with_sizes", "chunk", "unbind", "getitem", "identity",
    "broadcast_to", "narrow", "pad", "constant_pad_nd", "meshgrid",
}  # fmt: skip
# What makes a tensor with one value in every place out of its sizes; normalising leaves no other.
UNIFORM = {"full", "zeros", "ones", "empty"}
SOFTMAX = {"softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax", "logsumexp"}
_CUTS = {"slice", "narrow", "split", "split_with_sizes", "unbind", "chunk"}
_REDUCES = {
    "mean",
    "sum",
    "amax",
    "amin",
    "max",
    "min",
    "var",
    "std",
    "var_mean",
    "std_mean",
    "prod",
    "norm",
    "linalg_vector_norm",
    "softmax",
    "_softmax",
    "log_softmax",
    "_log_softmax",
    "_safe_softmax",
    "logsumexp",
    "any",
    "all",
    "argmax",
    "argmin",
    "topk",
    "sort",
    "argsort",
}
_PLACES = {"argmax", "argmin", "topk", "sort", "argsort"}  # what they return is a place among the keys
_ORDERED = {"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "flip", "roll"}
# Elementwise in fact, without the tag that says so.
_POINTWISE = {
    *(
        "masked_fill",
        "floor_divide",
        "copy",
        "where",
        "clamp",
        "one_hot",
        "nan_to_num",
        "lerp",
        "hardswish",
        "log_sigmoid",
    ),
    *("multiply", "subtract", "divide", "absolute", "negative", "__and__", "__or__", "__xor__"),
    *("greater", "greater_equal", "less", "less_equal", "not_equal"),
    *("arccos", "arcsin", "arctan", "arccosh", "arcsinh", "arctanh", "arctan2", "fix"),
}
_INDEXED = {
    "gather",
    "scatter",
    "scatter_add",
    "index_select",
    "index_add",
    "index_copy",
    "index_fill",
    "take_along_dim",
    "slice_scatter",
    "select_scatter",
    "glu",
}
_NORMS = {"layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"}
_PRODUCTS = {"matmul", "bmm", "mm", "baddbmm", "addmm", "addbmm", "linear", "mv", "dot"}


class Unknown(str):
    """A reason that is only a lack of knowledge: running the operator may prove it wrong."""


def name_of(node: fx.Node) -> str:
    """The operator's plain name: ``softmax`` for ``aten.softmax.int``."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    return getattr(target, "__name__", str(target))


def mixing_reason(node: fx.Node, carries: Carries, batched: Carries) -> Reason:
    """Why ``node`` does not keep tokens apart, or None.

    ``carries`` tells whether a size counts tokens, ``batched`` whether it counts rows of the batch alone.
    """
    name = name_of(node)
    if is_pointwise(node) or name == "scaled_dot_product_attention":
        return None
    if name in _MOVES:
        return _cuts(node, carries) or _pads(node, carries) or _reshapes(node, carries)
    if name in _PRODUCTS:
        return _contracts(node, name, carries)
    if name == "einsum":
        return _sums(node, carries)
    dims = _reduced_dims(node, name)
    if dims is not None:
        if _carries_at(node, dims, batched):
            return f"{node.target} runs along the batch"
        return _reduces(node, name, dims, carries)
    if name == "select":
        return f"{node.target} picks single tokens" if _carries_at(node, [_argument(node, "dim", 0)], carries) else None
    if name in _INDEXED:
        return f"{node.target} moves tokens" if _carries_at(node, [_argument(node, "dim", 0)], carries) else None
    if name == "index":
        return _indexes(node, carries)
    if name.startswith(("conv", "_conv")):
        return _convolves(node, carries)
    if name == "embedding":
        return f"{node.target} reads a table of tokens" if any(map(carries, _first_shape(node))) else None
    if not any(any(map(carries, shape_of(value_of(a)))) for a in node.all_input_nodes):
        return None
    reason = f"{node.target} is not known to keep tokens apart"
    return Unknown(reason) if isinstance(node.target, torch._ops.OpOverload) else reason


def is_pointwise(node: fx.Node) -> bool:
    """Whether an operator works element by element, broadcasting its inputs."""
    tagged = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    return tagged or name_of(node) in _POINTWISE


def _tensor(node: fx.Node) -> Any:
    return next((value_of(a) for a in node.all_input_nodes if isinstance(value_of(a), Tensor)), None)


def _argument(node: fx.Node, name: str, default: Any) -> Any:
    target: Any = node.target
    for i, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            own = argument.default_value if argument.has_default_value() else None
            given = node.args[i] if i < len(node.args) else node.kwargs.get(name, own)
            return default if given is None else given
    return default


def _carries_at(node: fx.Node, dims: Sequence[int], carries: Carries) -> bool:
    shape = shape_of(_tensor(node))
    return any(carries(shape[d]) for d in dims if -len(shape) <= d < len(shape))


def _cuts(node: fx.Node, carries: Carries) -> Reason:
    """Is a token dim cut, such as the first token taken for all?"""
    if name_of(node) not in _CUTS:
        return None
    dim = _argument(node, "dim", 0)
    if not _carries_at(node, [dim], carries):
        return None
    after: Expr = None
    if name_of(node) in ("slice", "narrow"):
        before, after = shape_of(_tensor(node))[dim], shape_of(value_of(node))[dim]
        dropped = before - after
        # Keys that were appended beside the tokens may be dropped again.
        if before == after or (
            dropped.is_Integer
            and carries(after)
            and _argument(node, "start", 0) == 0
            and dropped > 0
            and sum(map(carries, shape_of(_tensor(node)))) > 1
        ):
            return None
    group, number = (1, 1) if after is None else after.as_coeff_Mul()
    groups = "" if group == 1 or getattr(number, "is_Symbol", True) else f", into groups of {group} tokens"
    return f"{node.target} takes the sequence apart{groups}"


def _indexes(node: fx.Node, carries: Carries) -> Reason:
    """A table read at ids is an embedding; reading tokens at computed places moves them."""
    table: Any = node.args[0]
    indices: Any = node.args[1]
    shape = shape_of(value_of(table))
    read = [shape[i] for i, index in enumerate(indices) if index is not None]
    return f"{node.target} reads tokens at computed places" if any(map(carries, read)) else None


def _first_shape(node: fx.Node) -> tuple[Expr, ...]:
    first = node.args[0]
    return shape_of(value_of(first)) if isinstance(first, fx.Node) else ()


def _pads(node: fx.Node, carries: Carries) -> Reason:
    """Padding one side and cutting the other shifts tokens."""
    if name_of(node) not in ("pad", "constant_pad_nd"):
        return None
    pads: Any = node.args[1]
    shape = _first_shape(node)
    moved = [size for i, size in enumerate(reversed(shape)) if any(p != 0 for p in pads[2 * i : 2 * i + 2])]
    return f"{node.target} shifts the sequence" if any(map(carries, moved)) else None


def _reshapes(node: fx.Node, carries: Carries) -> Reason:
    """A reshape keeps tokens apart if each token still owns the same run of numbers."""
    name = name_of(node)
    if name == "repeat":
        before, after = (sum((s for s in shape if carries(s)), sympy.Integer(0)) for shape in _in_out(node))
        if before == after or tiles_apart(node, carries, _keeps_rows):
            return None
        return f"{node.target} repeats the sequence"
    if name not in ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as"):
        return None
    runs = [_runs(shape, carries) for shape in _in_out(node)]
    if len(runs[0]) == len(runs[1]) and all(a & b for a, b in zip(*runs, strict=True)):
        return None
    return f"{node.target} takes tokens apart"


def _keeps_rows(node: fx.Node) -> bool:
    return is_pointwise(node) or name_of(node) in ("linear", "mm", "_to_copy", "to", "clone", "contiguous")


def _in_out(node: fx.Node) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
    return _first_shape(node), shape_of(value_of(node))


def _runs(shape: Sequence[Expr], carries: Carries) -> list[set[Expr]]:
    """For each token dim, how many numbers may lie between one token and the next."""
    found, inner = [], sympy.Integer(1)
    for size in reversed(shape):
        if carries(size):
            found.append({sympy.expand(inner * m) for m in _merged(size, carries)})
        inner = inner * size
    return found


def _merged(size: Expr, carries: Carries) -> list[Expr]:
    """What may lie inside a token in a dim that merges tokens with heads, experts or rows."""
    if not size.free_symbols:
        return [sympy.Integer(1)]
    coefficient = sympy.expand(size).as_coeff_Mul()[0]
    content = abs(int(coefficient)) if coefficient.is_Integer else 1
    rows = sympy.prod([s for s in size.free_symbols if not carries(s)])
    factors = [sympy.Integer(m) for m in range(1, content + 1) if content % m == 0]
    return [m * r for m in factors for r in {sympy.Integer(1), rows}]


def _contracts(node: fx.Node, name: str, carries: Carries) -> Reason:
    left = node.args[1] if name in ("baddbmm", "addmm", "addbmm") else node.args[0]
    shape = shape_of(value_of(left)) if isinstance(left, fx.Node) else ()
    if not shape or not carries(shape[-1]) or sum(map(carries, shape)) > 1:
        return None
    return f"{node.target} sums over tokens outside attention"


def _sums(node: fx.Node, carries: Carries) -> Reason:
    """An einsum may sum over tokens where one of its operands holds a weight for each pair of them."""
    equation, operands = str(node.args[0]).replace(" ", ""), node.args[1]
    given, _, kept = equation.partition("->")
    if "->" not in equation or "." in equation:
        return f"{node.target} has the equation {equation}, whose letters do not name every dim"
    counted = []
    for letters, operand in zip(given.split(","), operands, strict=True):  # type: ignore[arg-type]
        counted.append([c for c, size in zip(letters, shape_of(value_of(operand)), strict=True) if carries(size)])
        if len(set(counted[-1])) < len(counted[-1]):
            return f"{node.target} takes a diagonal over tokens"
    summed = {c for letters in counted for c in letters if c not in kept}
    if all(any(c in letters and len(letters) > 1 for letters in counted) for c in summed):
        return None
    return f"{node.target} sums over tokens outside attention"


def _reduced_dims(node: fx.Node, name: str) -> list[int] | None:
    rank = len(shape_of(_tensor(node)))
    if name in _NORMS:
        return list(range(rank - len(_argument(node, "normalized_shape", [0])), rank))
    if name not in _REDUCES | _ORDERED:
        return None
    dims = _argument(node, "dim", _argument(node, "dims", None))
    if dims is None or dims == []:
        return list(range(rank))
    return [dims] if isinstance(dims, int) else list(dims)


def _reduces(node: fx.Node, name: str, dims: list[int], carries: Carries) -> Reason:
    if not _carries_at(node, dims, carries):
        return None
    # Attention scores have two token dims, queries and keys; reducing over the keys is attention itself.
    shape = shape_of(_tensor(node))
    last = len(dims) == 1 and dims[0] in (-1, len(shape) - 1)
    if name not in _ORDERED | _PLACES and last and sum(map(carries, shape)) > 1:
        return None
    return f"{node.target} runs along the sequence"


def _convolves(node: fx.Node, carries: Carries) -> Reason:
    weight = shape_of(value_of(node.args[1])) if isinstance(node.args[1], fx.Node) else ()
    if all(size == 1 for size in weight[2:]) or not any(map(carries, shape_of(_tensor(node))[2:])):
        return None
    return f"{node.target} convolves over tokens (kernel {tuple(map(int, weight[2:]))})"
