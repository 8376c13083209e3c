"""Where keys and values are cached: before they are spread out for attention, where a token's are smallest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from modpass.attention import moves
from modpass.decode.together import two_rows
from modpass.decode.worlds import is_size, size_at
from modpass.sizes import SEQUENCE, Refusal, Sizes
from modpass.symbols import shape_of, value_of

__all__ = ["Cut", "by_rows", "cut_at", "named", "spreads_heads"]


@dataclass(frozen=True)
class Cut:
    """The value that is cached, its dim that counts tokens, and the moves from there to attention, first to last."""

    node: fx.Node
    dim: int
    path: tuple[fx.Node, ...]


def cut_at(node: fx.Node, tokens: set[fx.Node], sizes: Sizes, known: dict[Any, int]) -> Cut:
    """The best place to cache what attention reads at ``node``: the fewest numbers a token, then ``[B, H, S, D]``.

    Raises:
        Refusal: no value on the way has one dim that counts tokens.
    """
    way = [node]
    while moves(way[-1]) and (source := way[-1].args[0]) in tokens:
        way.append(source)  # type: ignore[arg-type]
    fit = []
    for i, candidate in enumerate(way):
        shape = shape_of(value_of(candidate))
        dims = [d for d, size in enumerate(shape) if sizes.carries(size)]
        if len(dims) == 1 and sizes.canonical(shape[dims[0]]) == SEQUENCE and by_rows(candidate, sizes, known):
            rest = [sizes.canonical(s).subs(known) for d, s in enumerate(shape) if d != dims[0]]
            if all(s.is_Integer for s in rest):
                number = torch.Size(map(int, rest)).numel()
                cut = Cut(candidate, dims[0], tuple(reversed(way[:i])))
                fit.append((number, dims[0] != len(shape) - 2, len(shape) != 4, i, cut))
    if not fit:
        raise Refusal(f"the keys or values at node {node.name} have no dim of their own that counts tokens")
    return min(fit, key=lambda f: f[:4])[4]


def by_rows(node: fx.Node, sizes: Sizes, known: dict[Any, int]) -> bool:
    """Whether dim 0 counts rows of the batch, or several entries a row that lie together; tried on numbered rows."""
    way, trial = [node], two_rows(sizes, known)
    while moves(way[-1]) and isinstance(way[-1].args[0], fx.Node):
        way.append(way[-1].args[0])
    shape = shape_of(value_of(way[-1]))
    rows = [d for d, size in enumerate(shape) if size == sizes.batch]
    if len(rows) != 1:
        return bool(shape_of(value_of(node))[0] == sizes.batch)
    sample_shape = [int(sizes.canonical(s).subs({SEQUENCE: 3}).subs(trial)) for s in shape]
    numbers = torch.arange(2.0).view([2 if d == rows[0] else 1 for d in range(len(shape))]).expand(sample_shape)
    last = _moved(numbers, way, sizes, trial)
    each = last.shape[0] // 2
    wanted = torch.arange(2.0).repeat_interleave(each).view(-1, *[1] * (last.dim() - 1))
    return last.shape[0] == 2 * each and bool((last == wanted).all())


def _moved(sample: Tensor, way: list[fx.Node], sizes: Sizes, known: dict[Any, int]) -> Tensor:
    """``sample`` for the last node of ``way``, moved on to the first."""
    found: dict[fx.Node, Tensor] = {way[-1]: sample}
    for node in reversed(way[:-1]):
        value = lambda a: size_at(a, sizes, 3, known) if is_size(a) else found[a]  # noqa: E731
        found[node] = node.target(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value))  # type: ignore[operator]
    return found[way[0]]


def spreads_heads(cut: Cut, heads: int, sizes: Sizes, known: dict[Any, int]) -> bool:
    """Whether the moves after the cut only repeat each head for its group of queries; tried on numbered tokens."""
    shape = shape_of(value_of(cut.node))
    if len(shape) != 4 or cut.dim != 2 or not shape[1].is_Integer or heads % int(shape[1]):
        return False
    length = 3
    sample_shape = [length if d == 2 else int(sizes.canonical(s).subs(known)) for d, s in enumerate(shape)]
    sample = torch.arange(float(torch.Size(sample_shape).numel())).reshape(sample_shape)
    wanted = sample.repeat_interleave(heads // sample_shape[1], 1)
    found: Any = {cut.node: sample}
    for node in cut.path:
        value = lambda a: size_at(a, sizes, length, known) if is_size(a) else found[a]  # noqa: E731
        found[node] = node.target(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value))  # type: ignore[operator]
    last: Tensor = found[cut.path[-1]] if cut.path else sample
    return last.shape == wanted.shape and bool(torch.equal(last, wanted))


def named(pairs: list[tuple[fx.Node, str]], model: nn.Module) -> list[str]:
    """A name for each cache, of its node and kind, numbered where another cache or a parameter has it."""
    found: list[str] = []
    taken = {n for n, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    for node, kind in pairs:
        plain = name = cache_name(node, kind)
        number = 1
        while name in found or name in taken:
            name, number = f"{plain}_{number}", number + 1
        found.append(name)
    return found


def cache_name(node: fx.Node, kind: str) -> str:
    """A cache is called after the module that makes it."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    return f"{path}.{kind}" if path else kind
