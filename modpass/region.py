"""The nodes of one call of a module: its residual stream in and out, batch and sequence, what depends on the tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from modpass.mixing import MOVED, UNIFORM, mixing_reason, name_of
from modpass.sizes import Refusal, Sizes
from modpass.symbols import Expr, expr_of, hint_of, shape_of, value_of

__all__ = ["RESIDUAL", "Region"]

_ATTENTION = {"softmax", "_softmax", "_safe_softmax", "scaled_dot_product_attention"}
RESIDUAL = {
    "add",
    "add_",
    "sub",
    "mul",
    "to",
    "_to_copy",
    "dropout",
    "layer_norm",
    "rms_norm",
    "alias",
    "detach",
    "clone",
    "contiguous",
    "slice",
}


class Region:
    """The nodes of one call of a module, and their surroundings."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        self.nodes, self.inside = nodes, set(nodes)
        self.hints: dict[Expr, Any] = {}  # the sizes that attention runs over, as the trace has them

    def inputs(self) -> list[fx.Node]:
        """Tensors from outside that its nodes read, parameters and buffers aside."""
        outside = dict.fromkeys(a for n in self.nodes for a in n.all_input_nodes if a not in self.inside)
        return [a for a in outside if a.op != "get_attr" and isinstance(value_of(a), Tensor)]

    def outputs(self) -> list[fx.Node]:
        """Its tensors that something outside reads."""
        return [n for n in self.nodes if isinstance(value_of(n), Tensor) and any(u not in self.inside for u in n.users)]

    def residual_stream(self) -> tuple[fx.Node, fx.Node]:
        """The one input with the output's shape and dtype."""
        inputs, outputs = self.inputs(), self.outputs()
        pairs = [(i, o) for o in outputs for i in inputs if self._alike(i, o)]
        if not pairs:
            self.refuse_convolutions()
            raise Refusal(f"no input has an output's shape and dtype: inputs {_list(inputs)}, outputs {_list(outputs)}")
        streams = dict.fromkeys(i for i, _ in pairs)
        if len(pairs) > 1:
            near = [(d, i, o) for i, o in pairs if (d := self._distance(o, i)) is not None]
            if not near:
                raise Refusal(f"several inputs could be the residual stream: {_list(streams)}")
            best = min((-self.nodes.index(o), d) for d, _, o in near)
            tied = [(i, o) for d, i, o in near if (-self.nodes.index(o), d) == best]
            if len(tied) > 1:
                raise Refusal(f"several inputs could be the residual stream: {_list(i for i, _ in tied)}")
            return tied[0]
        return pairs[0]

    def _alike(self, a: fx.Node, b: fx.Node) -> bool:
        x, y = value_of(a), value_of(b)
        return (
            bool(x.is_floating_point()) and x.dtype == y.dtype and shape_of(value_of(a)) == shape_of(y) and x.dim() >= 3
        )

    def _distance(self, output: fx.Node, source: fx.Node) -> int | None:
        """Steps from ``output`` back to ``source`` along sums and norms, the way of the residual."""
        frontier, distance, seen = [output], 0, {output}
        while frontier:
            if source in frontier:
                return distance
            steps = [
                a
                for n in frontier
                if n in self.inside and name_of(n) in RESIDUAL
                for a in n.all_input_nodes
                if a not in seen and shape_of(value_of(a)) == shape_of(value_of(output))
            ]
            seen.update(steps)
            frontier, distance = list(dict.fromkeys(steps)), distance + 1
        return None

    def sizes(self, stream: fx.Node) -> tuple[Sizes, int]:
        """Batch and sequence: the sequence is what attention runs over."""
        first, second = shape_of(value_of(stream))[:2]
        attended = self.attended()
        self.hints |= {size: given for size, given in zip((first, second), value_of(stream).shape, strict=False)}
        for size in (first, second):  # keys beside the tokens (sinks) are seen by every token
            attended = [size if Sizes(first, size).surplus(a) else a for a in attended]
        if attended and first not in attended and second not in attended:
            counted, own, where = _told([self.hints[a] for a in attended], value_of(stream).shape[:2])
            raise Refusal(
                f"its attention runs over {counted} tokens, not over a dim of the stream ({own}){where}: "
                "windows or pooled keys"
            )
        if first == second:
            raise Refusal(f"batch and sequence are both {first} in the trace; trace with two different sizes")
        if first in attended and second not in attended:
            return Sizes(second, first), 0
        return Sizes(first, second), 1

    def sizes_of_several(self, stream: fx.Node) -> tuple[Sizes, int]:
        """Batch and sequence of a stream that is several side by side: attention alone tells which dims they are."""
        shape = shape_of(value_of(stream))
        free = [i for i, size in enumerate(shape) if not size.is_Integer]
        counted = [i for i in free if shape[i] in self.attended()]
        if len(free) != 2 or len(counted) != 1 or shape[free[0]] == shape[free[1]]:
            self.refuse_convolutions()
            hint = "; flatten its tokens to one dim, as most models do" if len(free) > 2 else ""
            raise Refusal(f"its stream [{', '.join(map(str, shape))}] has no one dim that attention runs over{hint}")
        return Sizes(shape[free[0] + free[1] - counted[0]], shape[counted[0]]), counted[0]

    def refuse_convolutions(self) -> None:
        """An image whose pixels are not laid out as one dim is no sequence; where they are convolved, that is why."""
        for node in self.nodes:
            if name_of(node).startswith("conv"):
                reason = mixing_reason(node, lambda size: not size.is_Integer, lambda size: False)
                if reason:
                    raise Refusal(f"{reason} (node {node.name})")

    def attended(self) -> list[Expr]:
        """The lengths that its attention runs over."""
        found: list[Expr] = []
        for node in self.nodes:
            if name_of(node) == "scaled_dot_product_attention":
                keys: Any = node.args[1]
                found.append(shape_of(value_of(keys))[-2])
                self.hints[found[-1]] = value_of(keys).shape[-2]
            elif _scores_tokens(node):
                found.append(shape_of(value_of(node))[-1])
                self.hints[found[-1]] = value_of(node).shape[-1]
        return list(dict.fromkeys(found))

    def dependent(self, *sources: fx.Node, strict: bool = True) -> list[fx.Node]:
        """The nodes whose value depends on the tokens, in order; numbers are none, and refused if ``strict``."""
        inner: dict[fx.Node, None] = {}
        for node in self.nodes:
            if any(a in sources or a in inner for a in node.all_input_nodes) and name_of(node) != "sym_size":
                if isinstance(value_of(node), torch.SymInt | torch.SymBool | torch.SymFloat):
                    if strict:
                        raise Refusal(f"{node.target} makes a number out of token values (node {node.name})")
                    continue
                inner[node] = None
        return list(inner)

    def uniform(self) -> set[fx.Node]:
        """Tensors with one value in every place: they are made anew inside, at the chosen length."""
        found: set[fx.Node] = set()
        for node in self.nodes:
            made = name_of(node) in UNIFORM and not any(isinstance(value_of(a), Tensor) for a in node.all_input_nodes)
            if made or (
                name_of(node) in MOVED
                and node.all_input_nodes
                and all(a in found for a in node.all_input_nodes if isinstance(value_of(a), Tensor))
                and any(a in found for a in node.all_input_nodes)
            ):
                found.add(node)
        return found

    def check_outputs(self, inner: set[fx.Node], output: fx.Node) -> None:
        """Raise Refusal where the output does not depend on the tokens (``inner``), or another result does."""
        if output not in inner:
            raise Refusal("its output does not depend on the stream")
        others = [n for n in self.outputs() if n in inner and n is not output]
        if others:
            raise Refusal(f"it returns more than the stream that depends on the tokens: {_list(others)}")


def _scores_tokens(node: fx.Node) -> bool:
    """A softmax, or a product of tokens with tokens."""
    shape = shape_of(value_of(node))
    if name_of(node) in ("matmul", "bmm", "baddbmm"):
        return len(shape) >= 3 and shape[-1] == shape[-2] and not shape[-1].is_Integer
    return name_of(node) in _ATTENTION and len(shape) >= 3


def _told(counted: Iterable[Any], own: Iterable[Any]) -> tuple[str, str, str]:
    """Two lists of sizes in words; where an expression is long, by their numbers in the example inputs."""
    texts = [[str(expr_of(size)) for size in sizes] for sizes in (counted, own)]
    if max(len(text) for sizes in texts for text in sizes) <= 24:
        return ", ".join(texts[0]), ", ".join(texts[1]), ""
    numbers = [", ".join(str(hint_of(size)) for size in sizes) for sizes in (counted, own)]
    return numbers[0], numbers[1], " with the example inputs"


def _list(nodes: Iterable[fx.Node]) -> str:
    return ", ".join(f"{n.name}[{', '.join(map(str, shape_of(value_of(n))))}]" for n in nodes) or "none"
