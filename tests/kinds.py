"""Kinds of models found by measuring every architecture, each as small as it gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo import Decoder, PreNorm, tokens


class ByProducts(nn.Module):
    """Attention made of q, k and v by a function."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], width: int = 48) -> None:
        super().__init__()
        self.attend, self.qkv, self.out = attend, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(q, k, v).flatten(2))


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def without_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).relu()
    return (scores @ v.transpose(1, 2)).transpose(1, 2)


def by_other_names(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = torch.multiply(q, 0.3).subtract(0.1).divide(2.0).negative()
    return nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    half = torch.zeros_like(q)
    half[..., :6] = q[..., 6:]
    half[..., 6:].copy_(q[..., :6])
    return nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (half, k, v))).transpose(1, 2)


def behind_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys and values are put behind those of an earlier call, of which there are none."""
    none = torch.zeros(q.shape[0], 0, *q.shape[2:])
    return by_einsum(q, torch.cat([none, k], 1), torch.cat([none, v], 1))


def cut_at_a_quantile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keeps the largest queries by a quantile that it works out itself."""
    bound = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(0.6))
    return by_einsum((q - bound * q.std(-1, keepdim=True)).relu(), k, v)


class EveryExpert(nn.Module):
    """All experts on all tokens: the tokens are copied for each expert, in front or (wrongly) behind."""

    def __init__(self, width: int, front: bool = True) -> None:
        super().__init__()
        self.front, self.router = front, nn.Linear(width, 3)
        self.weight, self.attend = nn.Parameter(torch.randn(3, width, width)), ByProducts(by_einsum)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        B, S, D = x.shape
        rows = x.reshape(-1, D)
        copies = rows.repeat(3, 1) * self.router(rows).sigmoid().t().reshape(-1, 1)
        if not self.front:
            return copies.reshape(B * S, 3, D).sum(1).view(B, S, D)
        return torch.bmm(copies.view(3, -1, D), self.weight).sum(0).view(B, S, D)


def by_complex_rotary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rotary positions as complex numbers."""
    angle = torch.arange(q.shape[1])[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.1, 0.05, 0.01])
    turn = torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * turn).flatten(-2) for t in (q, k))
    return by_einsum(q, k, v)


class TurnsBehind(nn.Module):
    """Rotary positions for all tokens but the first two, from a table that the model makes."""

    def __init__(self, split: bool) -> None:
        super().__init__()
        self.split, self.qkv, self.out = split, nn.Linear(48, 144), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        angle = torch.arange(x.shape[1] - 2)[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.1, 0.05, 0.01]).repeat(2)

        def turn(t: Tensor) -> Tensor:
            if self.split:
                first, rest = t.split((2, t.shape[2] - 2), 2)
                half = torch.cat([-rest[..., 6:], rest[..., :6]], -1)
            else:
                first, rest = t[:, :, :2], t[:, :, 2:]
                half = torch.stack([-rest[..., 1::2], rest[..., ::2]], -1).reshape(rest.shape)
            return torch.cat([first, rest * angle.cos() + half * angle.sin()], 2)

        y = nn.functional.scaled_dot_product_attention(turn(q), turn(k), v)
        return self.out(y.transpose(1, 2).flatten(2))


class Streams(nn.Module):
    """Three residual streams side by side: a block reads their mean and adds to each by its own weight."""

    def __init__(self, front: bool) -> None:
        super().__init__()
        self.front, self.block = front, PreNorm(ByProducts(by_einsum), 48)
        self.write = nn.Parameter(torch.tensor([0.5, 1.0, 1.5]))

    def forward(self, x: Tensor) -> Tensor:
        dim = 0 if self.front else 2
        y = self.block(x.mean(dim))
        return x + y.unsqueeze(dim) * self.write.view(*([3] if not self.front else [3, 1, 1]), 1)


class SideBySide(nn.Module):
    def __init__(self, front: bool) -> None:
        super().__init__()
        self.dim, self.embed = 0 if front else 2, nn.Embedding(97, 48)
        self.blocks = nn.ModuleList(Streams(front) for _ in range(2))
        self.apart = nn.Parameter(torch.randn(3, 48))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.stack([self.embed(ids) + row for row in self.apart], self.dim)
        for block in self.blocks:
            x = block(x)
        return x.mean(self.dim)


class Loose(Decoder):
    """Takes a second input through ``**others``."""

    def forward(self, ids: Tensor, **others: Tensor) -> Tensor:
        return super().forward(ids) * others["scale"]


class FixedTokens(nn.Module):
    """Sixteen tokens by construction, in blocks that take a setting through ``**settings``."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(16, 48))
        self.blocks = nn.ModuleList(Settled(ByProducts(by_einsum), 48) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 16, 48) + self.place
        for block in self.blocks:
            x = block(x, scale=2.0)
        return x


class Settled(PreNorm):
    def forward(self, x: Tensor, **settings: float) -> Tensor:
        return super().forward(x * settings["scale"]) + x


class Tabled(nn.Module):
    """Adds a table with a row for each of eighteen tokens: its own, or one that it is given."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.block = PreNorm(ByProducts(by_einsum), 48)
        self.place = nn.Parameter(torch.randn(18, 48)) if own else None

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        table = place if self.place is None else self.place
        y: Tensor = self.block(x + table.view(1, x.shape[1], 48))
        return x + y


class OfPieces(nn.Module):
    """Tokens are pieces of a row: their number is an expression, of which the trace cannot tell that it is 18."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.cut, self.place = nn.Conv1d(5, 48, 3, 3), nn.Parameter(torch.randn(18, 48))
        self.blocks = nn.ModuleList(Tabled(own) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).transpose(1, 2)
        for block in self.blocks:
            x = block(x, self.place)
        return x


class Biased(nn.Module):
    """Attention with a bias on the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(48, 144), nn.Linear(48, 48)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, bias[:, None, None])
        return x + self.out(y.transpose(1, 2).flatten(2))


class Tiles(nn.Module):
    """Four tiles of an image by construction; the trace cannot tell that a bias for each tile has as many."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.tile = nn.Conv1d(5, 48, 3, 3), nn.Parameter(torch.randn(4, 48))
        self.blocks = nn.ModuleList(Biased() for _ in range(2))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        pieces = self.cut(x.flatten(0, 1)).transpose(1, 2)
        count = pieces.shape[1]
        x = (pieces.unflatten(0, (-1, 4)) + self.tile[:, None]).flatten(1, 2)
        bias = bias[:, :, None].expand(-1, -1, count).flatten(1)
        for block in self.blocks:
            x = block(x, bias)
        return x


class SharedKeys(nn.Module):
    """Blocks that make queries alone, and attend to keys and values made once for all of them."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.embed, self.keys = nn.Embedding(97, 48), nn.Linear(48, 96)
        self.blocks = nn.ModuleList(Reader(fused) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.keys(x).chunk(2, -1))
        for block in self.blocks:
            x = block(x, k, v)
        return x


class Reader(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused, self.query, self.out = fused, nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (4, -1)).transpose(1, 2)
        if self.fused:
            y = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            y = torch.softmax(q @ k.transpose(2, 3), -1) @ v
        return x + self.out(y.transpose(1, 2).flatten(2))


class Crossing(nn.Module):
    """Self attention, then attention to a longer sequence, whose keys all stay."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.query, self.keys = ByProducts(by_einsum), nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.own(x)
        keys = self.keys(memory)
        return x + torch.softmax(self.query(x) @ keys.transpose(1, 2), -1) @ keys


class Crosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Crossing() for _ in range(2))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, memory)
        return x


class Looped(nn.Module):
    """Layers are lists of modules, which the model's own loop calls in turn."""

    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    def __init__(self) -> None:
        super().__init__()
        branches = ByProducts(by_einsum), nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48))
        self.embed = nn.Embedding(97, 48)
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.ModuleList([nn.LayerNorm(48)]), branch, self.Sum()]) for branch in branches
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for (norm,), branch, total in self.blocks:
            x = total(x, branch(norm(x)))
        return x


class Listed(PreNorm):
    """Returns the stream in a list."""

    def forward(self, x: Tensor) -> list[Tensor]:  # type: ignore[override]
        return [super().forward(x)]


class ReadsLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 48)
        self.blocks = nn.ModuleList(Listed(ByProducts(by_einsum), 48) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)[0]
        return x


def ids(B: int, S: int) -> dict[str, Any]:
    return {"ids": tokens(B, S)}


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], dict[str, Any]]]] = {
    "einsum": (lambda: Decoder(lambda w, h: ByProducts(by_einsum), 2), ids),
    "no softmax": (lambda: Decoder(lambda w, h: ByProducts(without_softmax), 2), ids),
    "other names": (lambda: Decoder(lambda w, h: ByProducts(by_other_names), 2), ids),
    "quantile": (lambda: Decoder(lambda w, h: ByProducts(cut_at_a_quantile), 2), ids),
    "complex rotary": (lambda: Decoder(lambda w, h: ByProducts(by_complex_rotary), 2), ids),
    "prefix split off": (lambda: Decoder(lambda w, h: TurnsBehind(True), 2), ids),
    "prefix cut off": (lambda: Decoder(lambda w, h: TurnsBehind(False), 2), ids),
    "every expert": (lambda: Decoder(lambda w, h: EveryExpert(w), 2), ids),
    "in place": (lambda: Decoder(lambda w, h: ByProducts(in_place), 2), ids),
    "behind nothing": (lambda: Decoder(lambda w, h: ByProducts(behind_nothing), 2), ids),
    "streams inside": (lambda: SideBySide(False), ids),
    "streams in front": (lambda: SideBySide(True), ids),
    "shared keys": (lambda: SharedKeys(False), ids),
    "shared keys, fused": (lambda: SharedKeys(True), ids),
    "lists": (ReadsLists, ids),
    "a loop over lists": (Looped, ids),
    "cross attention": (
        Crosses,
        lambda B, S: {"x": torch.randn(B, S, 48), "memory": torch.randn(B, S + 9, 48)},
    ),
    "loose inputs": (
        lambda: Loose(lambda w, h: ByProducts(by_einsum), 2),
        lambda B, S: {**ids(B, S), "scale": torch.rand(B, S, 1)},
    ),
    "a table of one length": (lambda: OfPieces(False), lambda B, S: {"x": torch.randn(B, 5, 54)}),
    "a table of the block's own": (lambda: OfPieces(True), lambda B, S: {"x": torch.randn(B, 5, 54)}),
    "a bias by another input's sizes": (
        Tiles,
        lambda B, S: {"x": torch.randn(B, 4, 5, S), "bias": torch.randn(B, 4)},
    ),
    "fixed tokens": (FixedTokens, lambda B, S: {"x": torch.randn(B, 16, 48)}),
}


def make_kind(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = KINDS[name][0]().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(3.0)
    return model
