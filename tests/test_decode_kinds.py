"""Ways to write attention that decode must follow or refuse."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modpass
from modpass.decode import decode_step
from modpass.errors import BlockError, InputError
from tests.decoders import full_forward, generated

WIDTH, HEADS, LENGTH = 16, 2, 12
Scores = Callable[[Tensor, Tensor], Tensor]


class Written(nn.Module):
    """Attention by hand; ``change`` works on the scores ``[B, H, S, S]`` before the causal mask."""

    def __init__(self, change: Scores | None = None) -> None:
        super().__init__()
        self.qkv, self.out, self.change = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), change

    def heads(self, x: Tensor) -> list[Tensor]:
        return [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = q @ k.transpose(-1, -2) / 3
        scores = scores if self.change is None else self.change(scores, x)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.out((scores.masked_fill(hidden, -1e9).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Fused(Written):
    """Fused attention with a mask of one's own, or none."""

    def __init__(self, mask: Callable[[int], Tensor] | None) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        mask = None if self.mask is None else self.mask(x.shape[1])
        return self.out(F.scaled_dot_product_attention(*self.heads(x), attn_mask=mask).transpose(1, 2).flatten(2))


class HeadFirst(Written):
    """Heads are laid before the rows of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.cat(t.unbind(1), 0) for t in self.heads(x))
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y = (q @ k.transpose(-1, -2)).masked_fill(hidden, -1e9).softmax(-1) @ v
        return self.out(torch.cat(y.chunk(HEADS, 0), -1))


class Residual(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


class Model(nn.Module):
    def __init__(
        self, attention: Callable[[], nn.Module], calls: int = 1, end: Callable[[Tensor], Tensor] | None = None
    ):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place, self.head = nn.Embedding(31, WIDTH), nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 31)
        self.blocks, self.calls, self.end = (
            nn.ModuleList(Residual(attention()) for _ in range(2)),
            calls,
            end or (lambda x: x),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        for _ in range(self.calls):
            for block in self.blocks:
                x = block(x)
        return self.head(self.end(x))


def traced(model: nn.Module) -> modpass.RoutedModel:
    return modpass.trace(model.eval(), (torch.randint(2, 31, (2, 9)),))


def check(model: modpass.RoutedModel) -> None:
    ids = torch.randint(2, 31, (3, LENGTH))
    logits, positions, _ = generated(model, ids, torch.tensor([5, 3, 1]))
    wanted = full_forward(model, ids)
    for row in range(3):
        gap = (logits[row] - wanted[row, positions[row]]).abs().max() / wanted.abs().max()
        assert float(gap) < 1e-4


def test_a_block_that_is_called_again_has_caches_of_its_own() -> None:
    model = traced(Model(Written, calls=2))
    names = [c.name for c in decode_step(model, batch=1, max_sequence=8).caches]
    assert len(set(names)) == len(names) == 8
    check(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda scores, x: 20 * torch.tanh(scores / 20),
        lambda scores, x: scores + torch.arange(x.shape[1]) * 0.1,
        lambda scores, x: scores - (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).abs() * 0.2,
    ],
    ids=["softcap", "key bias", "relative bias"],
)
def test_scores_may_be_capped_and_biased_by_place(change: Scores) -> None:
    check(traced(Model(lambda: Written(change))))


def test_products_of_a_token_with_itself_reach_the_head() -> None:
    check(traced(Model(Written, end=lambda x: x * x)))


def strict(S: int) -> Tensor:
    """A token sees those before it; the first sees nothing."""
    return torch.ones(S, S, dtype=torch.bool).tril(-1)


def test_a_row_that_sees_nothing_is_zero_as_in_the_fused_operator() -> None:
    check(traced(Model(lambda: Fused(strict))))


def test_routed_blocks_keep_a_diagonal_that_the_mask_hides() -> None:
    def mask(S: int) -> Tensor:
        own = torch.zeros(S, S, dtype=torch.bool)
        own[0, 0] = True
        return strict(S) | own

    model = Model(lambda: Fused(mask)).eval()
    ids = torch.randint(2, 31, (2, 9))
    routed = modpass.mod_transform(model, 1.0, every=1, gate="unit", selection="causal", example_inputs=(ids,))
    for block in routed.routed_blocks.values():
        block.passes = lambda scores, keep: torch.ones_like(scores, dtype=torch.bool)  # type: ignore[method-assign]
    with torch.no_grad():
        assert float((routed(ids) - model(ids)).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (lambda: Written(lambda scores, x: scores / x.shape[1]), "computes with the sequence length"),
        (lambda: HeadFirst(), "stacks rows of the batch"),
        (lambda: Fused(None), "not causal"),
        (lambda: Fused(lambda S: torch.arange(S)[:, None] // 4 >= torch.arange(S) // 4), "not causal"),
        (lambda: Fused(lambda S: strict(S) | torch.eye(S).bool() | (torch.arange(S) < 3)), "not causal"),
    ],
    ids=["divided by S", "heads first", "both ways", "chunks", "prefix"],
)
def test_what_cannot_be_cached_is_refused_in_words(attention: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(BlockError, match=words):
        decode_step(traced(Model(attention)), batch=2, max_sequence=LENGTH)


def test_a_model_without_examples_is_refused() -> None:
    model = Model(Written).eval()
    free = torch.export.Dim.AUTO
    program = torch.export.export(
        model, (torch.randint(2, 31, (2, 9)),), dynamic_shapes={"ids": {0: free, 1: free}}, strict=False
    )
    program._example_inputs = None
    with pytest.raises(BlockError, match="brings no example inputs"):
        decode_step(modpass.trace(program), batch=1, max_sequence=8)


def test_caches_longer_than_the_table_of_positions_are_refused() -> None:
    with pytest.raises((BlockError, InputError), match=r"100"):
        decode_step(traced(Model(Written)), batch=1, max_sequence=100)


def test_positions_beyond_the_caches_are_refused() -> None:
    step = decode_step(traced(Model(Written)), batch=1, max_sequence=8)
    for position in (-1, 8):
        with pytest.raises(InputError, match="the caches hold positions 0 to 7"):
            step.advance({"ids": torch.tensor([[3]])}, torch.tensor([position]), step.state())


def test_scale_is_not_lost() -> None:
    class Scaled(Written):
        def forward(self, x: Tensor) -> Tensor:
            y = F.scaled_dot_product_attention(*self.heads(x), is_causal=True, scale=math.pi)
            return self.out(y.transpose(1, 2).flatten(2))

    check(traced(Model(Scaled)))
