"""The slow reference: routing in plain Python over tokens, on the original model, for tests and for doubt.

It shares no code with the pass. The dense model runs with each routed block's own forward replaced: the block sees
the whole sequence, with the positions and masks it makes itself, but attention cannot see a token that was not
chosen; then the chosen tokens are written back one by one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modpass.errors import InputError
from modpass.program import plain_attention

__all__ = ["Routing", "Setting", "causal_choice", "hidden_keys", "reference_choice", "routed_reference"]


_SINKS = 2  # keys that are no tokens, appended to those that are


class Setting:
    """How one block is routed: its capacity, gate, router weight ``[D]``, where its stream has batch and sequence, and
    its selection.

    order: the permutation that puts batch and sequence first; given for a stream of more than three dims. token_dims:
    how many of those after the batch count tokens, two in an image.
    max_sequence: for causal selection, the length that the capacity is a share of (None: the sequence's own).
    decides: for causal selection, a token's logit from the token ``[D]`` (None: the router's score).
    """

    def __init__(
        self,
        capacity: float,
        gate: str,
        weight: Tensor,
        seq_dim: int = 1,
        selection: str = "expert_choice",
        max_sequence: int | None = None,
        order: Sequence[int] | None = None,
        token_dims: int = 1,
        decides: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.decides, self.token_dims = decides, token_dims
        self.capacity, self.gate, self.weight = capacity, gate, weight
        self.selection, self.max_sequence = selection, max_sequence
        self.order = tuple(order or ((0, 1, 2) if seq_dim == 1 else (1, 0, 2)))

    def is_stream(self, value: Any) -> bool:
        """Whether an argument of the block can be its stream."""
        return isinstance(value, Tensor) and value.dim() == len(self.order) and value.is_floating_point()

    def there(self, x: Tensor) -> Tensor:
        """The stream as ``[B, S, D]``."""
        return x.permute(self.order).flatten(1, self.token_dims).flatten(2)

    def back(self, x_BSD: Tensor, shape: torch.Size) -> Tensor:
        """``[B, S, D]`` as the model has it."""
        apart = x_BSD.reshape([shape[i] for i in self.order])
        return apart.permute([self.order.index(i) for i in range(len(self.order))])

    def choose(self, scores: list[float], keep: list[bool] | None) -> list[int]:
        """The chosen positions of one row."""
        if self.selection == "causal":
            return causal_choice(scores, self.capacity, keep, self.max_sequence)
        return reference_choice(scores, self.capacity, keep)


def reference_choice(scores: list[float], capacity: float, keep: list[bool] | None = None) -> list[int]:
    """The chosen positions of one row: most valued first, lowest index on ties, padding last.

    >>> reference_choice([0.5, 2.0, 2.0, 1.0], 0.5)
    [1, 2]
    """
    count = max(1, math.floor(capacity * len(scores) + 1e-6))

    def order(i: int) -> tuple[int, float, int]:
        padded = keep is not None and not keep[i]
        score = -math.inf if math.isnan(scores[i]) else scores[i]
        return (1 if padded else 0, 0.0 if padded else -max(score, -3.4028234663852886e38), i)

    return sorted(sorted(range(len(scores)), key=order)[:count])


def causal_choice(
    scores: list[float], capacity: float, keep: list[bool] | None = None, max_sequence: int | None = None
) -> list[int]:
    """The chosen positions of one row, token by token: each that passes takes a slot while there is one.

    >>> causal_choice([0.5, -2.0, 2.0, 1.0], 0.5)
    [0, 2]
    """
    count, chosen = max(1, math.floor(capacity * (max_sequence or len(scores)) + 1e-6)), list[int]()
    for i, score in enumerate(scores):
        if score > 0 and (keep is None or keep[i]) and len(chosen) < count:
            chosen.append(i)
    return chosen


@contextmanager
def routed_reference(
    model: nn.Module,
    settings: dict[str, Setting],
    keep: Tensor | None = None,
    chosen: dict[str, list[list[int]]] | None = None,
) -> Iterator[nn.Module]:
    """Inside, ``model`` computes what its routed form should; ``keep`` ``[B, S]`` marks real tokens.

    ``chosen`` receives each block's positions.

    >>> with routed_reference(nn.Identity(), {}) as model: model(1)
    1
    """
    with ExitStack() as stack:
        stack.enter_context(plain_attention())
        for path in dict.fromkeys(name.partition("@")[0] for name in settings):
            block = model.get_submodule(path)
            if isinstance(block, nn.ModuleList):
                stack.enter_context(_list_routed(block, Routing(settings[path], keep, partial(_note, chosen, path))))
                continue
            calls = {
                n: _routed(block.forward, Routing(s, keep, partial(_note, chosen, n)))
                for n, s in settings.items()
                if n.partition("@")[0] == path
            }
            stack.enter_context(mock.patch.object(block, "forward", _in_turn(path, block.forward, calls)))
        yield model


def _in_turn(path: str, dense: Callable[..., Any], calls: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """A module that one forward calls several times: ``path``, then ``path@1`` and so on."""
    count = itertools.count()

    def forward(*args: Any, **kwargs: Any) -> Any:
        number = next(count)
        return calls.get(f"{path}@{number}" if number else path, dense)(*args, **kwargs)

    return forward


def _note(chosen: dict[str, list[list[int]]] | None, name: str, positions: list[list[int]]) -> None:
    if chosen is not None:
        chosen[name] = positions


class Routing:
    """One call of one block: who goes through, and what becomes of the stream."""

    def __init__(self, setting: Setting, keep: Tensor | None, note: Callable[[list[list[int]]], None]) -> None:
        self.setting, self.keep, self.note = setting, keep, note

    def start(self, arguments: Sequence[Any]) -> Any:
        """Choose among the tokens of the stream in ``arguments``; a context in which only those are seen."""
        setting = self.setting
        self.stream = next(filter(setting.is_stream, arguments))
        x_BSD = self.x_BSD = setting.there(self.stream)
        fits = self.keep if self.keep is not None and self.keep.shape == x_BSD.shape[:2] else None
        self.scores = [[(token.float() * setting.weight).sum() for token in row] for row in x_BSD]
        decide = setting.decides
        deciding = self.scores if decide is None else [[decide(token) for token in row] for row in x_BSD]
        self.chosen = [
            setting.choose(
                [s.detach().item() for s in row],
                None if fits is None else [bool(v) for v in fits[b]],
            )
            for b, row in enumerate(deciding)
        ]
        self.note(self.chosen)
        return hidden_keys(self.chosen, x_BSD.shape[1])

    def write(self, y: Tensor) -> Tensor:
        """The stream with the chosen tokens of the block's output ``y`` written back, one by one."""
        y_BSD, rows = self.setting.there(y), []
        for b, row in enumerate(self.x_BSD):
            gates = [_gate(self.setting.gate, score) for score in self.scores[b]]
            tokens = [
                row[i] + gates[i] * (y_BSD[b, i] - row[i]) if i in self.chosen[b] else row[i] for i in range(len(row))
            ]
            rows.append(torch.stack(tokens))
        return self.setting.back(torch.stack(rows), self.stream.shape)


def _routed(dense: Callable[..., Any], routing: Routing) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        with routing.start([*args, *kwargs.values()]):
            output = dense(*args, **kwargs)
        several = isinstance(output, tuple | list)
        routed = routing.write(output[0] if several else output)
        return type(output)([routed, *output[1:]]) if several else routed

    return forward


@contextmanager
def _list_routed(block: nn.ModuleList, routing: Routing) -> Iterator[None]:
    """A list of modules that the model's own loop calls in turn: the first gets the stream, the last returns it."""
    entries = [m for m in block.modules() if not isinstance(m, nn.ModuleList)]
    outer = [m for m in entries if not any(m is not o and m in set(o.modules()) for o in entries)]
    first, last, inside = outer[0].forward, outer[-1].forward, ExitStack()

    def begin(*args: Any, **kwargs: Any) -> Any:
        inside.enter_context(routing.start([*args, *kwargs.values()]))
        return first(*args, **kwargs)

    def end(*args: Any, **kwargs: Any) -> Any:
        output = last(*args, **kwargs)
        inside.close()
        return routing.write(output)

    with mock.patch.object(outer[0], "forward", begin), mock.patch.object(outer[-1], "forward", end), inside:
        yield


def _gate(gate: str, score: Tensor) -> Tensor | float:
    if gate == "unit":
        return 1.0
    return score if gate == "linear" else 1 / (1 + torch.exp(-score))


@contextmanager
def hidden_keys(chosen: list[list[int]], sequence: int) -> Iterator[None]:
    """Attention inside sees the chosen tokens of each row alone; a token that was not chosen sees itself.

    Raises:
        InputError: a head of written-out attention is as wide as the sequence is long.

    >>> with hidden_keys([[0]], 2): torch.softmax(torch.zeros(1, 1, 2, 2), -1)[0, 0].tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    """
    seen = torch.zeros(len(chosen), sequence, sequence, dtype=torch.bool)
    for b, positions in enumerate(chosen):
        seen[b] = torch.eye(sequence, dtype=torch.bool)
        seen[b][:, positions] = True
    attention, softmax, logsumexp = F.scaled_dot_product_attention, torch.softmax, torch.logsumexp
    topk = torch.topk

    def visible(shape: torch.Size) -> Tensor:
        rows = seen if len(shape) == 3 else seen.view(len(chosen), *[1] * (len(shape) - 3), sequence, sequence)
        return rows.repeat_interleave(shape[0] // len(chosen), 0) if shape[0] != len(chosen) else rows

    def masked_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        shape = torch.Size([*query.shape[:-1], key.shape[-2]])
        if shape[-2:] != (sequence, sequence):
            return attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        hidden = ~visible(shape)
        if is_causal:
            hidden = hidden | torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
        bias = torch.zeros(shape, dtype=query.dtype)
        if attn_mask is not None:
            bias = bias.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else bias + attn_mask
        return attention(query, key, value, bias.masked_fill(hidden, -math.inf), dropout_p, **options)

    def masked_softmax(input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        extra = input.shape[-1] - sequence
        own = 0 <= extra <= _SINKS  # more are the tokens of another sequence, all of them seen
        if input.dim() >= 3 and input.shape[-2] == sequence and own and dim in (-1, input.dim() - 1):
            hidden = F.pad(~visible(torch.Size([*input.shape[:-1], sequence])), (0, extra))
            input = input.masked_fill(hidden, -math.inf)
        kwargs.pop("_stacklevel", None)
        result: Tensor = softmax(input, dim, *args, **kwargs)  # type: ignore[arg-type]
        return result

    def masked_logsumexp(input: Tensor, dim: int, keepdim: bool = False) -> Tensor:
        if input.shape[-2:] == (sequence, sequence) and input.dim() >= 3 and dim in (-1, input.dim() - 1):
            input = input.masked_fill(~visible(input.shape), -math.inf)
        return logsumexp(input, dim, keepdim)

    def masked_topk(input: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
        """Keys that attention picks by rank are picked among those that are seen."""
        if input.shape[-2:] == (sequence, sequence) and input.dim() >= 3 and dim in (-1, input.dim() - 1):
            input = input.masked_fill(~visible(input.shape), -math.inf)
        return topk(input, k, dim, *args, **kwargs)

    def only_visible(left: Any) -> Any:
        """Weights that no softmax made (linear, relu or kernel attention) give hidden keys nothing either."""
        scores = isinstance(left, Tensor) and left.dim() >= 3 and left.shape[-2:] == (sequence, sequence)
        return left.masked_fill(~visible(left.shape), 0) if scores and left.is_floating_point() else left

    def masked_product(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def multiply(left: Any, right: Any, *others: Any, **options: Any) -> Tensor:
            shapes = [v.shape[-2:] for v in (left, right) if isinstance(v, Tensor) and v.dim() >= 3]
            if shapes == [(sequence, sequence)] * 2:
                raise InputError(
                    f"the reference cannot tell queries from scores where a head is as wide as the sequence is long "
                    f"({sequence}); take another length"
                )
            return product(only_visible(left), right, *others, **options)

        return multiply

    with (
        ExitStack() as products,
        mock.patch.object(torch, "logsumexp", masked_logsumexp),
        mock.patch.object(F, "scaled_dot_product_attention", masked_attention),
        mock.patch.object(F, "softmax", masked_softmax),
        mock.patch.object(torch, "softmax", masked_softmax),
        mock.patch.object(Tensor, "softmax", masked_softmax),
        mock.patch.object(torch, "topk", masked_topk),
        mock.patch.object(Tensor, "topk", masked_topk),
    ):
        for holder, name in itertools.product((torch, Tensor), ("matmul", "bmm")):
            products.enter_context(mock.patch.object(holder, name, masked_product(getattr(holder, name))))
        products.enter_context(mock.patch.object(Tensor, "__matmul__", masked_product(Tensor.__matmul__)))
        yield
