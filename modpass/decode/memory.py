"""What a step needs of earlier tokens outside attention: a running sum, or a window of the last few tokens.

A sum over all tokens so far is the last one and this token. A shift, or a convolution that looks back, reads the
last n tokens; where it begins with zeros, these stand for tokens before the first. Either way a step remembers the
last n values of one node, ``[B, .., n, ..]``: of the sum itself, or of what goes into the window.

A value that was padded by n in front has the size S + n; in a step it is n + 1 long, and an operator that makes S + m
of it makes m + 1 there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from modpass.decode.caches import by_rows
from modpass.decode.worlds import is_size
from modpass.mixing import MOVED, is_pointwise, mixing_reason, name_of
from modpass.sizes import SEQUENCE, Sizes
from modpass.symbols import shape_of, value_of

__all__ = ["Memory", "Remembered", "find_memory"]


@dataclass(frozen=True)
class Remembered:
    """The last ``count`` values of ``node`` along ``dim``; kind: "running_sum" or "window"."""

    node: fx.Node
    dim: int
    count: int
    kind: str


@dataclass
class Memory:
    """kept: by the operator that reads it, what is remembered; cut: where a slice begins in a padded value.

    followed: every operator that a step makes with what it remembers.
    """

    kept: dict[fx.Node, Remembered] = field(default_factory=dict)
    cut: dict[fx.Node, int] = field(default_factory=dict)
    followed: set[fx.Node] = field(default_factory=set)

    def parts(self) -> list[Remembered]:
        """Each part once, in order."""
        return list(dict.fromkeys(self.kept.values()))


def find_memory(tokens: Collection[fx.Node], sizes: Sizes, known: dict[Any, int]) -> Memory:
    """Find what a step must remember. What cannot be followed is left out, for ``refuse_mixing`` to name."""
    memory, inner = Memory(), set(tokens)
    looks = {"cumsum": _Look.sum, "pad": _Look.pad, "constant_pad_nd": _Look.pad, "conv1d": _Look.convolution}
    looks |= dict.fromkeys(("cat", "concat"), _Look.put_before)
    for node in tokens:
        if node.op == "call_function" and name_of(node) in looks:
            looks[name_of(node)](_Look(node, inner, sizes, known), memory)
    return memory


class _Look:
    """One operator that may read earlier tokens."""

    def __init__(self, node: fx.Node, inner: set[fx.Node], sizes: Sizes, known: dict[Any, int]) -> None:
        self.node, self.inner, self.sizes, self.known = node, inner, sizes, known
        self.source: Any = node.args[0]

    def sum(self, memory: Memory) -> None:
        """A cumulative sum along the tokens."""
        dim = self._dim(self.node.args[1], self.node)
        if dim is not None:
            memory.kept[self.node] = Remembered(self.node, dim, 1, "running_sum")
            memory.followed.add(self.node)

    def pad(self, memory: Memory) -> None:
        """Zeros before the first token: a shift, or the beginning of a window."""
        pads: Any = self.node.args[1]
        padded = [i for i in range(len(pads) // 2) if pads[2 * i] or pads[2 * i + 1]]
        if len(padded) != 1 or not self._fills_zeros():
            return
        before, after = pads[2 * padded[0] : 2 * padded[0] + 2]
        dim = self._dim(-1 - padded[0], self.source)
        if dim is None or not isinstance(before, int) or before < 1 or after not in (0, -before):
            return
        way = _Way(self.inner, self.sizes, {self.node: before})
        if after:
            way.cut[self.node] = 0
        if after or way.follow(self.node):
            self._keep(memory, dim, before, way)

    def convolution(self, memory: Memory) -> None:
        """A convolution that pads both ends with zeros, and whose end is cut off."""
        reach = _reach(self.node, self.inner)
        padding: Any = self.node.args[4] if len(self.node.args) > 4 else None
        if not reach or padding not in ([reach], (reach,)):
            return
        dim = self._dim(2, self.source)
        way = _Way(self.inner, self.sizes, {})
        if dim is not None and way.trail(self.node, reach):
            self._keep(memory, dim, reach, way)

    def put_before(self, memory: Memory) -> None:
        """One value for all rows before every token but the last: a shift that does not begin with zeros."""
        parts: Any = self.node.args[0]
        if len(parts) != 2 or parts[0] in self.inner or parts[1] not in self.inner or name_of(parts[1]) != "slice":
            return
        self.source, way = parts[1].args[0], _Way(self.inner, self.sizes, {})
        dim = self._dim(self.node.args[1] if len(self.node.args) > 1 else 0, self.source)
        if dim is None or way.extra(parts[1]) != -1 or way.extra(self.node) != 0 or _start(parts[1]) != 0:
            return
        if list(parts[1].users) == [self.node]:
            self._keep(memory, dim, 1, way)
            memory.followed.add(parts[1])

    def _keep(self, memory: Memory, dim: int, count: int, way: _Way) -> None:
        memory.kept[self.node] = Remembered(self.source, dim, count, "window")
        memory.followed |= {self.node, *way.followed}
        memory.cut |= way.cut

    def _fills_zeros(self) -> bool:
        mode, *value = [*self.node.args[2:], *self.node.kwargs.values()] or ["constant"]
        fill = [v for v in (mode, *value) if not isinstance(v, str)]
        return mode in ("constant", None, 0) and all(v in (None, 0) for v in fill)

    def _dim(self, dim: Any, node: Any) -> int | None:
        """Which dim of ``node``, if it alone counts tokens, and dim 0 counts rows."""
        shape = shape_of(value_of(node)) if isinstance(node, fx.Node) else ()
        counted = [d for d, size in enumerate(shape) if self.sizes.carries(size)]
        if not counted or counted != [dim % len(shape)] or counted == [0]:
            return None
        rest = (self.sizes.canonical(s).subs(self.known).is_Integer for d, s in enumerate(shape) if d != counted[0])
        plain = self.sizes.canonical(shape[counted[0]]) == SEQUENCE and all(rest)
        return counted[0] if plain and by_rows(node, self.sizes, self.known) else None


class _Way:
    """From a padded value to those that have one entry a token again. longer: by how much each is longer than S."""

    def __init__(self, inner: set[fx.Node], sizes: Sizes, longer: dict[fx.Node, int]) -> None:
        self.inner, self.sizes, self.longer = inner, sizes, longer
        self.cut: dict[fx.Node, int] = {}
        self.followed: set[fx.Node] = set()

    def follow(self, node: fx.Node) -> bool:
        """Whether all that is made of a padded value can be made of a window."""
        return all(is_size(user) or self._takes(user, node, self.longer[node]) for user in node.users)

    def _takes(self, user: fx.Node, node: fx.Node, extra: int) -> bool:
        left = self.extra(user)
        if left is None or not 0 <= left <= extra:
            return False
        if name_of(user) == "slice" and left < extra:
            start = _start(user) if self._along(user, node) else None
            if start is None or (left and start != extra - left):
                return False
            if not left:
                self.cut[user] = start
        elif name_of(user) == "unfold":
            if not self._along(user, node) or list(user.args[2:]) != [extra + 1, 1]:
                return False
        elif name_of(user) == "conv1d":
            if user.args[0] is not node or _reach(user, self.inner) != extra - left or not _bare(user):
                return False
        elif left != extra or not self._apart(user, node):
            return False
        self.followed.add(user)
        self.longer[user] = left
        return not left or self.follow(user)

    def trail(self, node: fx.Node, extra: int) -> bool:
        """Whether nothing but the first S entries of a value of S + ``extra`` is used in the end."""
        for user in node.users:
            if is_size(user):
                return False
            if name_of(user) == "slice" and self._along(user, node):
                if _start(user) != 0 or self.extra(user) != 0:
                    return False
                self.cut[user] = 0
                self.followed.add(user)
            elif not (self.extra(user) == extra and self._apart(user, node) and self.trail(user, extra)):
                return False
        return bool(node.users)

    def _apart(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether an operator works on each entry of the one long value that it takes."""
        if mixing_reason(user, self.sizes.carries, self.sizes.is_batch):
            return False
        counted = [a for a in user.all_input_nodes if any(map(self.sizes.carries, shape_of(value_of(a))))]
        return counted == [node] and (is_pointwise(user) or name_of(user) in MOVED)

    def _along(self, user: fx.Node, node: fx.Node) -> bool:
        shape = shape_of(value_of(node))
        dim: Any = user.args[1] if len(user.args) > 1 else 0
        return self.sizes.carries(shape[dim])

    def extra(self, node: fx.Node) -> int | None:
        """By how much the one dim that counts tokens is longer than S."""
        found = [self.sizes.canonical(s) - SEQUENCE for s in shape_of(value_of(node)) if self.sizes.carries(s)]
        return int(found[0]) if len(found) == 1 and found[0].is_Integer else None


def _start(node: fx.Node) -> int | None:
    """Where a slice of every entry begins, counted from the first."""
    start: Any = node.args[2] if len(node.args) > 2 else 0
    start = 0 if start is None else start
    return start if isinstance(start, int) and start >= 0 and len(node.args) < 5 else None


def _reach(node: fx.Node, inner: set[fx.Node]) -> int:
    """How many tokens a convolution looks back, if it takes every token and its weight is a parameter; else 0."""
    given: list[Any] = [*node.args, *[None, None, None, [1], [0], [1], 1][len(node.args) :]]
    _, weight, _, stride, _, dilation, _ = given
    shape = shape_of(value_of(weight)) if isinstance(weight, fx.Node) else ()
    if len(shape) != 3 or not shape[-1].is_Integer or list(stride) != [1] or node.kwargs:
        return 0
    if any(a in inner for a in node.all_input_nodes[1:]):
        return 0
    return (int(shape[-1]) - 1) * int(dilation[0])


def _bare(node: fx.Node) -> bool:
    """Whether a convolution pads nothing."""
    padding: Any = node.args[4] if len(node.args) > 4 else [0]
    return list(padding) == [0]
