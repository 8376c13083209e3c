"""``prefill``: the forward of a whole prompt that also fills the caches of ``decode_step``."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from modpass.attention_find import find_attention
from modpass.causal import dependent
from modpass.decode.caches import Cut, cut_at, named
from modpass.decode.causality import check_causal, check_length
from modpass.decode.memory import Remembered
from modpass.decode.model import Cache, PrefillModel, State, StepInfo, TensorInput
from modpass.decode.names import free_placeholder, free_stem
from modpass.decode.outer import Outer, open_model, whole_numbers
from modpass.decode.prefill_block import PrefillBlock
from modpass.decode.worlds import is_size, size_at
from modpass.errors import BlockError, InputError
from modpass.mixing import is_pointwise, name_of
from modpass.routing import RoutedBlock
from modpass.sizes import Refusal
from modpass.symbols import shape_of, value_of

__all__ = ["Logits", "prefill"]

Logits = Literal["last", "all"]
_TOKENWISE = {"linear", "matmul", "to", "_to_copy", "slice", "clone", "alias"}


def prefill(
    model: nn.Module | ExportedProgram,
    *,
    batch: int,
    sequence: int,
    max_sequence: int,
    logits: Logits = "last",
    padding: bool = True,
    dims: Mapping[str, int] | None = None,
) -> PrefillModel:
    """Derive the graph that reads a prompt and fills the caches that ``decode_step`` goes on with.

    Args:
        model: dense, or routed with ``selection="causal"``.
        batch: rows B.
        sequence: tokens S of the prompt; shorter prompts are padded on the right and ``length`` says how far they go.
        max_sequence: tokens that the caches hold. A routed block has its capacity's share of these, so that prompt
            and decode together choose what one causal forward over ``max_sequence`` tokens would.
        logits: the model's outputs at the last token of each row ``[B, 1, ..]``, or at all ``[B, S, ..]``.
        padding: keep masks such as ``attention_mask`` as inputs ``[B, S]`` (for rows padded on the left).
        dims: other free sizes by name.

    Returns:
        A graph module that takes the tokens, masks and ``length`` ``[B]``, and returns the model's outputs, then the
        state of ``decode_step``: caches, counts and places, by the names in ``output_names``.

    Raises:
        BlockError: tokens mix outside causal attention; names the operator.
        InputError: an argument is not what is allowed.

    >>> from modpass.decode.example import tiny_decoder
    >>> prefill(tiny_decoder(), batch=1, sequence=4, max_sequence=8).output_names
    ('output', 'blocks.0.key', 'blocks.0.value', 'blocks.1.key', 'blocks.1.value')
    """
    if logits not in get_args(Logits):
        raise InputError(f"logits is {logits!r}; it must be one of {', '.join(map(repr, get_args(Logits)))}")
    whole_numbers(batch=batch, sequence=sequence, max_sequence=max_sequence)
    if sequence > max_sequence:
        raise InputError(f"sequence is {sequence}, more than the {max_sequence} tokens that the caches hold")
    outer = open_model(model, batch, dims)
    check_length(outer, max_sequence)
    check_causal(outer)
    try:
        return _Prefill(outer, sequence, max_sequence, logits == "last", padding).model()
    except Refusal as e:
        raise BlockError(f"this model cannot be decoded: {e}") from e


class _Prefill:
    """Copies the whole graph at a fixed sequence, with the cached values as further outputs."""

    def __init__(self, outer: Outer, sequence: int, max_sequence: int, last: bool, padding: bool) -> None:
        self.outer, self.sequence, self.max_sequence, self.last = outer, sequence, max_sequence, last
        self.graph = fx.Graph()
        self.tokens = dependent(outer.graph, *outer.tokens)
        self.inner = {*self.tokens, *outer.tokens}
        self.env: dict[fx.Node, Any] = {}
        self.inputs: list[TensorInput] = []
        self.blocks: list[tuple[PrefillBlock, fx.Node]] = []
        self.ones: dict[str, Tensor] = {}
        self.stem = free_stem(outer.model, "prefill")
        for node in outer.graph.nodes:
            if node.op == "placeholder":
                self._input(node, padding)
        self.length = self._placeholder("length", (outer.rows,), torch.int64)
        self.narrowed = self._narrowed() if last else {}
        for node in outer.graph.nodes:
            if node.op in ("get_attr", "call_function", "call_module") and not is_size(node):
                self.env[node] = self._copy(node)

    def _placeholder(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
        self.inputs.append(TensorInput(name, shape, dtype))
        return free_placeholder(self.graph, name)

    def _input(self, node: fx.Node, padding: bool) -> None:
        name, dtype = str(node.target), value_of(node).dtype
        shape = tuple(self._size(s) for s in shape_of(value_of(node)))
        if node in self.outer.whole and not padding and name in self.outer.model.info.call.optional:
            held = f"{free_stem(self.outer.model, 'ones')}_{len(self.ones)}"
            self.ones[held] = torch.ones(shape, dtype=dtype)
            self.env[node] = self.graph.get_attr(held)
        else:
            self.env[node] = self._placeholder(name, shape, dtype)

    def _size(self, expr: Any) -> int:
        sizes = self.outer.sizes
        return int(sizes.canonical(expr).subs({sizes.canonical(sizes.sequence): self.sequence}).subs(self.outer.known))

    def _value(self, node: fx.Node) -> Any:
        if is_size(node):
            return size_at(node, self.outer.sizes, self.sequence, self.outer.known)
        return self.env[node]

    def _copy(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self.graph.get_attr(str(node.target))
        if node.op == "call_module":
            return self._routed(node)
        args, kwargs = fx.map_arg(node.args, self._value), fx.map_arg(node.kwargs, self._value)
        if node in self.narrowed:
            args = (self.graph.call_function(last_token, (args[0], self.length)), *args[1:])
        made = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        made.meta = {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}
        return made

    def _narrowed(self) -> dict[fx.Node, None]:
        """For each output, the first of the operators before it that work token by token, such as the head."""
        found: dict[fx.Node, None] = {}
        output = next(n for n in self.outer.graph.nodes if n.op == "output")
        for leaf in pytree.tree_leaves(output.args):
            if not isinstance(leaf, fx.Node) or leaf not in self.inner:
                continue
            if not self._tokenwise(leaf) or len(leaf.users) > 1:
                continue
            node: Any = leaf
            while self._tokenwise(node.args[0]) and len(node.args[0].users) == 1:
                node = node.args[0]
            found[node] = None
        return found

    def _tokenwise(self, node: Any) -> bool:
        if not isinstance(node, fx.Node) or node.op != "call_function":
            return False
        carries, source = self.outer.sizes.carries, node.args[0] if node.args else None
        others = [a for a in node.all_input_nodes if a is not source]
        return (
            isinstance(source, fx.Node)
            and source in self.inner
            and node.args.count(source) == 1
            and len(shape_of(value_of(source))) == 3
            and shape_of(value_of(source))[:2] == shape_of(value_of(node))[:2]
            and (name_of(node) in _TOKENWISE or is_pointwise(node))
            and not any(is_size(a) or a in self.inner or any(map(carries, shape_of(value_of(a)))) for a in others)
        )

    def _routed(self, node: fx.Node) -> Any:
        block: Any = self.outer.model.get_submodule(str(node.target))
        if not isinstance(block, RoutedBlock):
            raise Refusal(f"the submodule '{node.target}' is no routed block")
        made = PrefillBlock(block, self.max_sequence, self.outer.known)
        stream, keep, *sides = (None if a is None else self._value(a) for a in node.args)  # type: ignore[arg-type]
        call = self.graph.call_module(f"{self.stem}_{len(self.blocks)}", (stream, keep, self.length, *sides))
        self.blocks.append((made, call))
        return self.graph.call_function(operator.getitem, (call, 0))

    def _cuts(self) -> list[tuple[Cut, str]]:
        found: dict[fx.Node, tuple[Cut, str]] = {}
        for kind, end in find_attention(self.tokens, self.outer.sizes.carries).cached():
            cut = cut_at(end, self.inner, self.outer.sizes, self.outer.known)
            found.setdefault(cut.node, (cut, kind))
        return list(found.values())

    def _state(self, part: Remembered, name: str) -> State:
        shape = [self._size(s) for s in shape_of(value_of(part.node))]
        shape[part.dim] = part.count
        return State(name, tuple(shape), value_of(part.node).dtype)

    def model(self) -> PrefillModel:
        output = next(n for n in self.outer.graph.nodes if n.op == "output")
        leaves = [n for n in pytree.tree_leaves(output.args) if isinstance(n, fx.Node)]
        results: list[Any] = [self._result(n) for n in leaves]
        caches = []
        cuts, parts = self._cuts(), self.outer.memory.parts()
        names_of = named([*((c.node, k) for c, k in cuts), *((p.node, p.kind) for p in parts)], self.outer.model)
        for (cut, _), name in zip(cuts, names_of, strict=False):
            shape = [self._size(s) for s in shape_of(value_of(cut.node))]
            shape[cut.dim] = self.max_sequence
            caches.append(Cache(name, tuple(shape), value_of(cut.node).dtype, cut.dim))
            results.append(self.graph.call_function(pad_to, (self.env[cut.node], cut.dim, self.max_sequence)))
        states = [self._state(p, n) for p, n in zip(parts, names_of[len(cuts) :], strict=True)]
        for part in parts:
            given = (self.env[part.node], self.length, part.dim, part.count)
            results.append(self.graph.call_function(last_values, given))
        routing = []
        for block, call in self.blocks:
            routing.append(block.routing())
            results += [self.graph.call_function(operator.getitem, (call, i + 1)) for i in range(2 + len(block.caches))]
        self.graph.output(tuple(results))
        names = tuple(self.outer.model.output_names[: len(leaves)])
        kept = (tuple(caches), tuple(states), tuple(routing))
        info = StepInfo(self.outer.rows, self.max_sequence, tuple(self.inputs), *kept, names)
        modules = {f"{self.stem}_{i}": b for i, (b, _) in enumerate(self.blocks)}
        return PrefillModel.build(self.outer.model, self.graph, info, self.ones, modules)

    def _result(self, node: fx.Node) -> Any:
        value = self.env[node]
        sizes = self.outer.sizes
        if self.last and node in self.inner and shape_of(value_of(node))[:2] != (sizes.batch, sizes.sequence):
            raise Refusal(f"the output at node {node.name} does not begin with batch and sequence; take logits='all'")
        narrow = self.last and node in self.inner and node not in self.narrowed and not self._narrows(node)
        return self.graph.call_function(last_token, (value, self.length)) if narrow else value

    def _narrows(self, node: fx.Node) -> bool:
        """Whether a chain of token-wise operators that was narrowed ends at ``node``."""
        while node not in self.narrowed:
            if not self._tokenwise(node):
                return False
            node = node.args[0]  # type: ignore[assignment]
        return True


def last_token(x_BSD: Tensor, length_B: Tensor) -> Tensor:
    """The last real token of each row, ``[B, 1, D]``.

    >>> last_token(torch.arange(3.0).view(1, 3, 1), torch.tensor([2])).item()
    1.0
    """
    return x_BSD[torch.arange(x_BSD.shape[0], device=x_BSD.device), length_B - 1].unsqueeze(1)


def last_values(x: Tensor, length_B: Tensor, dim: int, count: int) -> Tensor:
    """The values of the last ``count`` real tokens of each row along ``dim``; zeros before the first.

    >>> last_values(torch.tensor([[3, 4, 5]]), torch.tensor([2]), 1, 3).tolist()
    [[0, 3, 4]]
    """
    length = length_B.repeat_interleave(x.shape[0] // length_B.shape[0])[:, None]
    at = length - count + torch.arange(count, device=x.device)
    front = x.movedim(dim, 1)
    taken = front[torch.arange(x.shape[0], device=x.device)[:, None], at.clamp(min=0)]
    return taken.masked_fill((at < 0).view(*at.shape, *[1] * (x.dim() - 2)), 0).movedim(1, dim)


def pad_to(x: Tensor, dim: int, size: int) -> Tensor:
    """``x`` with zeros behind up to ``size`` along ``dim``.

    >>> pad_to(torch.ones(1, 2), 1, 3).tolist()
    [[1.0, 1.0, 0.0]]
    """
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, size - x.shape[dim]])
