"""Experts that tokens are sorted by: decode follows those that put every token back, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modpass.decode import decode_step, prefill
from modpass.errors import BlockError
from tests.test_decode_kinds import LENGTH, WIDTH, Model, Written, check, traced

EXPERTS, EACH = 4, 2


class Sorted(Written):
    """After attention, ``EACH`` of ``EXPERTS`` a token; the methods are what near misses do otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.weights = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def parts(self, counts: list[int]) -> list[int]:
        return counts

    def inside(self, rows: Tensor) -> Tensor:
        return F.silu(rows)

    def back(self, order: Tensor) -> Tensor:
        return order

    def out_of(self, pieces: list[Tensor]) -> list[Tensor]:
        return pieces

    def forward(self, x: Tensor) -> Tensor:
        x = x + super().forward(x)
        flat = x.reshape(-1, WIDTH)
        scores, picked = self.gate(flat).topk(EACH, 1)
        counts = torch.zeros(flat.shape[0], EXPERTS).scatter(1, picked, 1).long().sum(0).tolist()
        order = picked.flatten().sort(0)[1]
        token = order.div(EACH, rounding_mode="trunc")
        pieces = flat[token].split(self.parts(counts), 0)
        done = torch.cat(self.out_of([F.linear(p, w) for p, w in zip(pieces, self.weights, strict=True)]), 0)
        done = self.inside(done) * scores.softmax(1).flatten()[order][:, None]
        return torch.zeros_like(flat).index_add(0, self.back(token), done).view_as(x)


def test_tokens_sorted_by_expert_are_computed_alone() -> None:
    check(traced(Model(Sorted)))


def test_a_prompt_is_sorted_too() -> None:
    model, read = traced(Model(Sorted)), 5
    ids = torch.randint(2, 31, (2, read + 1))
    first = prefill(model, batch=2, sequence=read, max_sequence=LENGTH, logits="all")
    step = decode_step(model, batch=2, max_sequence=LENGTH)
    outputs, state = first.fill({"ids": ids[:, :read]})
    found = step.advance({"ids": ids[:, read:]}, torch.full((2,), read), {**step.state(), **state})
    joined = torch.cat([outputs["output"], found["output"]], 1)
    torch.testing.assert_close(joined, model(ids), rtol=1e-4, atol=1e-5)


class WrongParts(Sorted):
    def parts(self, counts: list[int]) -> list[int]:
        return counts[::-1]


class WrongOrder(Sorted):
    def out_of(self, pieces: list[Tensor]) -> list[Tensor]:
        return pieces[::-1]


class WrongPlaces(Sorted):
    def back(self, order: Tensor) -> Tensor:
        return order.flip(0)


class Summed(Sorted):
    def inside(self, rows: Tensor) -> Tensor:
        return rows.cumsum(0)


class Averaged(Sorted):
    def inside(self, rows: Tensor) -> Tensor:
        return rows - rows.mean(0)


@pytest.mark.parametrize("kind", [WrongParts, WrongOrder, WrongPlaces, Summed, Averaged])
def test_tokens_that_meet_in_the_sorted_order_are_refused(kind: Callable[[], nn.Module]) -> None:
    with pytest.raises(BlockError, match=r"aten.sum.dim_IntList runs along the sequence .* aten.sort.default"):
        decode_step(traced(Model(kind)), batch=1, max_sequence=LENGTH)


def test_numbers_made_of_token_values_are_refused() -> None:
    class Counted(Written):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * x.sum().item())

    with pytest.raises(BlockError, match=r"aten.sum.default runs along .* later also aten.item.default"):
        decode_step(traced(Model(Counted)), batch=1, max_sequence=LENGTH)
