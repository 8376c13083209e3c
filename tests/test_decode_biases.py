"""Scores and masks that the tokens themselves decide: keys that are picked, biases by key, query, or both."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modpass
from modpass.decode import decode_step
from modpass.errors import BlockError
from tests.test_decode_kinds import HEADS, LENGTH, WIDTH, Model, Written, check, traced


def later(S: int) -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).triu(1)


class Biased(Written):
    """Attention with a mask that ``bias`` makes; how: fused, or written out."""

    fused = True

    def bias(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        bias = self.bias(x)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            scores = q @ k.transpose(-1, -2) / 3
            y = (scores.masked_fill(~bias, -1e9) if bias.dtype == torch.bool else scores + bias).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Picked(Biased):
    """An indexer: small queries and one small key a token; each query sees its best ``count`` keys."""

    def __init__(self, count: int = 3, fused: bool = True, largest: bool = True) -> None:
        super().__init__()
        self.queries, self.key, self.weights = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 3)
        self.count, self.fused, self.largest = count, fused, largest

    def bias(self, x: Tensor) -> Tensor:
        S = x.shape[1]
        each = self.queries(x).unflatten(-1, (3, 8)) @ self.key(x).transpose(-1, -2).unsqueeze(1)
        scores = (self.weights(x).unsqueeze(-2) @ each).squeeze(-2).masked_fill(later(S), -math.inf)
        places = scores.topk(min(self.count, S), largest=self.largest).indices
        hidden = torch.ones_like(scores, dtype=torch.bool).scatter(-1, places, False)
        return ~(hidden | later(S)).unsqueeze(1)


class ByKey(Biased):
    """Each key says how much it wants to be seen."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.wish, self.form, self.fused = nn.Linear(WIDTH, HEADS), form, form != "added"

    def bias(self, x: Tensor) -> Tensor:
        wish, S = self.wish(x).transpose(1, 2).unsqueeze(2), x.shape[1]
        wish = wish.expand(-1, -1, S, -1) if self.form == "expanded" else wish
        return wish.masked_fill(later(S), -1e9)


class ByDistance(Biased):
    """Each query has a table of biases by distance."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(WIDTH, HEADS * 6)

    def bias(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        far = (place[:, None] - place).clamp(0, 5).expand(x.shape[0], HEADS, -1, -1)
        table = self.table(x).unflatten(-1, (HEADS, 6)).transpose(1, 2)
        return table.gather(-1, far).masked_fill(later(x.shape[1]), -1e9)


class ByPair(Biased):
    """What a query says times what a key says."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def bias(self, x: Tensor) -> Tensor:
        both = (self.query(x) * self.key(x).transpose(1, 2)).unsqueeze(1)
        return both.masked_fill(later(x.shape[1]), -1e9)


class Asked(Written):
    """A query of the model's own, the same for every token, asks each token alone beside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (4, -1))
        asked = self.query.expand(*x.shape[:2], -1, -1) @ parts
        return super().forward(x + asked.repeat(1, 1, 1, 4).flatten(2))


BIASES: dict[str, Callable[[], nn.Module]] = {
    "picked keys": Picked,
    "picked keys, written out": lambda: Picked(fused=False),
    "by key": lambda: ByKey("plain"),
    "by key, expanded": lambda: ByKey("expanded"),
    "by key, added to scores": lambda: ByKey("added"),
    "by key, added first": lambda: Written(lambda scores, x: scores + x.mean(-1)[:, None, None]),
    "by distance": ByDistance,
    "by pair": ByPair,
    "a query of the model's own": Asked,
}


@pytest.mark.parametrize("name", BIASES)
def test_scores_that_tokens_decide_decode_like_the_full_forward(name: str) -> None:
    check(traced(Model(BIASES[name])))


@pytest.mark.parametrize("capacity", [0.25, 0.5])
@pytest.mark.parametrize("name", ["picked keys", "picked keys, written out", "by key, expanded", "by distance"])
def test_routed_blocks_may_hold_such_scores(name: str, capacity: float) -> None:
    """The block's own cache holds what each of its tokens says as a key."""
    model = Model(BIASES[name]).eval()
    routed = modpass.mod_transform(
        model, capacity, selection="causal", gate="sigmoid", example_inputs=(torch.randint(2, 31, (2, 9)),)
    )
    for block in routed.routed_blocks.values():
        block.max_sequence = LENGTH
        torch.nn.init.normal_(block.router.weight)
    check(routed)


class FromIds(nn.Module):
    """A mask made of the ids: padding, or documents that do not see each other."""

    def __init__(self, documents: bool) -> None:
        super().__init__()
        self.model, self.documents = Model(Written), documents

    def forward(self, ids: Tensor) -> Tensor:
        S, model = ids.shape[1], self.model
        x = model.embed(ids) + model.place(torch.arange(S))
        number = (ids == 3).cumsum(1)
        apart = number[:, None, :] != number[:, :, None] if self.documents else (ids == 3)[:, None, :]
        seen = (~(later(S) | apart) | torch.eye(S, dtype=torch.bool)).unsqueeze(1)
        for block in model.blocks:
            q, k, v = block.attention.heads(x)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            x = x + block.attention.out(y.transpose(1, 2).flatten(2))
        return model.head(x)


@pytest.mark.parametrize("documents", [False, True])
def test_masks_made_of_ids_are_cached(documents: bool) -> None:
    model = traced(FromIds(documents))
    check(model)
    kinds = [c.name for c in decode_step(model, batch=1, max_sequence=8).caches if "bias" in c.name]
    assert len(kinds) == 1


def test_picks_of_the_lowest_keys_are_refused() -> None:
    with pytest.raises(BlockError, match="picks the keys with the lowest scores"):
        decode_step(traced(Model(lambda: Picked(99, largest=False))), batch=1, max_sequence=LENGTH)


def test_an_indexer_caches_one_small_key_a_token() -> None:
    step = decode_step(traced(Model(Picked)), batch=2, max_sequence=8)
    assert [c.shape for c in step.caches if "index" in c.name] == [(2, 8, 8)] * 2
