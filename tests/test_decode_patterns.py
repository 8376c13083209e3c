"""Patterns of whole models that decode follows: rows taken together, rows picked by a mask, decay without softmax."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modpass
from modpass.decode import decode_step, prefill
from modpass.errors import BlockError, InputError
from modpass.exporters import export_decoder
from tests.test_decode_kinds import LENGTH, WIDTH, Model, Written, check, traced

BOOKS = 3


class Codebooks(nn.Module):
    """Tokens of several codebooks ``[B*books, S]`` are summed into one stream, which has a head for each."""

    def __init__(self, books: int = BOOKS) -> None:
        super().__init__()
        self.model, self.books = Model(Written), books
        self.embed = nn.ModuleList(nn.Embedding(31, WIDTH) for _ in range(books))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 31) for _ in range(books))

    def forward(self, ids: Tensor) -> Tensor:
        books = ids.reshape(-1, self.books, ids.shape[-1])
        x = sum(e(books[:, i]) for i, e in enumerate(self.embed)) + self.model.place(torch.arange(ids.shape[1]))
        for block in self.model.blocks:
            x = block(x)
        return torch.stack([h(x) for h in self.heads], 1).reshape(-1, ids.shape[1], 31)


def codebooks(model: nn.Module | None = None) -> modpass.RoutedModel:
    torch.manual_seed(0)
    return modpass.trace((model or Codebooks()).eval(), (torch.randint(2, 31, (2 * BOOKS, 9)),))


def test_codebooks_are_rows_of_one_step() -> None:
    model, rows = codebooks(), 2
    step = decode_step(model, batch=rows, max_sequence=LENGTH)
    ids, state = torch.randint(2, 31, (rows * BOOKS, LENGTH)), step.state()
    assert step.inputs[0].shape == (rows * BOOKS, 1)
    assert step.caches[0].shape[0] == rows
    found = [step.advance({"ids": ids[:, t : t + 1]}, torch.full((rows,), t), state) for t in range(LENGTH)]
    torch.testing.assert_close(torch.cat([f["output"] for f in found], 1), model(ids), rtol=1e-4, atol=1e-5)


def test_a_prompt_of_codebooks_goes_on_where_it_was_read() -> None:
    model, rows, read = codebooks(), 2, 5
    first = prefill(model, batch=rows, sequence=read, max_sequence=LENGTH, logits="all")
    step = decode_step(model, batch=rows, max_sequence=LENGTH)
    ids = torch.randint(2, 31, (rows * BOOKS, read + 1))
    _, state = first.fill({"ids": ids[:, :read]})
    found = step.advance({"ids": ids[:, read:]}, torch.full((rows,), read), {**step.state(), **state})
    torch.testing.assert_close(found["output"], model(ids)[:, read:], rtol=1e-4, atol=1e-5)


def test_codebooks_are_not_for_a_session(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"input 'ids' takes 3, such as codebooks"):
        export_decoder(codebooks(), tmp_path / "d", batch=1, prompt=4, max_sequence=8)


class Turned(Codebooks):
    """The rows of a codebook, and not those of one sound, lie together in the attention."""

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([e(ids) for e in self.embed], 0)
        for block in self.model.blocks:
            x = block(x)
        return self.model.head(x)


def test_rows_that_a_model_multiplies_are_refused() -> None:
    with pytest.raises(BlockError, match=r"stacks rows of the batch|no free batch"):
        decode_step(codebooks(Turned()), batch=1, max_sequence=LENGTH)


class Adapted(nn.Module):
    """After each block an adapter for the rows that a mask picks; ``pick`` makes the mask of the hidden values."""

    def __init__(self, pick: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.pick, self.adapter = Model(Written), pick, nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed(ids) + self.model.place(torch.arange(ids.shape[1]))
        for block in self.model.blocks:
            x = block(x)
            mask = self.pick(x)
            adapted = torch.zeros_like(x)
            adapted[mask] = F.gelu(self.adapter(x[mask]))
            x = x + adapted
        return self.model.head(x)


def test_rows_that_no_token_picks_are_written_back() -> None:
    check(traced(Adapted(lambda x: torch.ones(x.shape[0]) == 1)))
    check(traced(Adapted(lambda x: torch.ones(x.shape[0]) == 0)))


@pytest.mark.parametrize(
    ("pick", "words"),
    [
        (lambda x: x[..., 0] > 0, "aten.index_put.default is not known to keep tokens apart"),
        (lambda x: torch.ones(x.shape[:2]) == 1, "aten.index_put.default is not known to keep tokens apart"),
        (lambda x: x.mean((1, 2)) > 0, "aten.mean.dim runs along the sequence"),
    ],
    ids=["tokens by tokens", "tokens", "rows by tokens"],
)
def test_what_a_mask_picks_otherwise_is_refused(pick: Callable[[Tensor], Tensor], words: str) -> None:
    with pytest.raises(BlockError, match=words):
        decode_step(traced(Adapted(pick)), batch=1, max_sequence=LENGTH)


class Decayed(Written):
    """Products weighed by how long ago a key was, without softmax, in chunks with a state between them."""

    def __init__(self, chunk: int = 16, causal: bool = True) -> None:
        super().__init__()
        age = (torch.arange(chunk)[:, None] - torch.arange(chunk)).float()
        self.chunk, self.decay = chunk, nn.Buffer(torch.where((age >= 0) | (not causal), 0.8 ** age.abs(), 0.0))

    def forward(self, x: Tensor) -> Tensor:
        S, state, outputs = x.shape[1], x.new_zeros(x.shape[0], 2, WIDTH // 2, WIDTH // 2), []
        queries, keys, values = self.heads(F.silu(x))
        for i in range((S + self.chunk - 1) // self.chunk):
            start, end = i * self.chunk, min((i + 1) * self.chunk, S)
            q, k, v = (t[:, :, start:end] for t in (queries, keys, values))
            n = end - start
            inside = (q @ k.transpose(-1, -2) * self.decay[:n, :n]) @ v
            outputs.append(inside + (q * self.decay[:n, :1] * 0.8) @ state)
            state = state * 0.8**n + (k * self.decay[n - 1, :n, None]).transpose(-1, -2) @ v
        return self.out(torch.cat(outputs, -2).transpose(1, 2).flatten(2))


def test_products_that_decay_are_stepped_within_the_chunk_that_the_trace_holds_for() -> None:
    check(traced(Model(Decayed)))


def test_caches_longer_than_the_chunk_are_refused() -> None:
    with pytest.raises(InputError, match="max_sequence is 17, a length for which the model's trace does not hold"):
        decode_step(traced(Model(Decayed)), batch=1, max_sequence=17)


def test_products_that_see_later_keys_are_refused() -> None:
    with pytest.raises(BlockError, match="its attention is not causal"):
        decode_step(traced(Model(lambda: Decayed(causal=False))), batch=1, max_sequence=LENGTH)


class Looped(Written):
    """A state that goes from token to token in a loop."""

    def forward(self, x: Tensor) -> Tensor:
        state, made = x[:, 0], []
        for t in range(x.shape[1]):
            state = 0.5 * state + x[:, t]
            made.append(state)
        return torch.stack(made, 1)


class Counted(Written):
    """A table as long as the sequence, made in Python; every token sees all."""

    def forward(self, x: Tensor) -> Tensor:
        age = torch.tensor(list(range(x.shape[1]))[::-1])
        q, k, v = self.heads(x)
        return self.out(((q @ k.transpose(-1, -2) + 0.01 * age).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (Looped, r"holds for 9 tokens alone, which it takes one by one in a loop, as a recurrent scan .* decode$"),
        (Counted, r"makes a constant .*; nor is it causal: other tokens from 4 on change what earlier ones compute"),
    ],
)
def test_a_trace_of_one_length_is_refused_with_what_fixed_it(attention: type[nn.Module], words: str) -> None:
    with pytest.raises(BlockError, match=words):
        decode_step(traced(Model(attention)), batch=1, max_sequence=9)


def test_a_refusal_names_what_else_stands_in_the_way() -> None:
    class Scanned(Written):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.cumprod(1) + x.flip(1))

    with pytest.raises(BlockError, match=r"runs along the sequence \(node cumprod\); later also aten.flip.default"):
        decode_step(traced(Model(Scanned)), batch=1, max_sequence=LENGTH)
