"""Sums and windows over earlier tokens outside attention: a step remembers them, or they are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modpass
from modpass.decode import decode_step, prefill
from modpass.errors import BlockError
from modpass.exporters import DecoderSession, export_decoder
from modpass.exporters.onnx_device import OnnxRuntimeCudaBackend
from tests.decoders import full_forward, generated
from tests.test_decode_kinds import LENGTH, WIDTH, Model, Written, check, traced

Mix = Callable[[Tensor], Tensor]


class Mixed(nn.Module):
    """Attention of ``Model``, and before each block something that looks at earlier tokens."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.model, self.mix = Model(Written), mix

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed(ids) + self.model.place(torch.arange(ids.shape[1]))
        for block in self.model.blocks:
            x = block(self.mix(x))
        return self.model.head(x)


class Convolution(nn.Module):
    """Padded on both sides, as ``nn.Conv1d`` does it, and cut to the first S; ``act`` comes before the cut."""

    def __init__(self, act: Mix = lambda x: x, dilation: int = 1, minus: bool = False, kernel: int = 3) -> None:
        super().__init__()
        self.pad = dilation * (kernel - 1)
        self.conv = nn.Conv1d(WIDTH, WIDTH, kernel, padding=self.pad, dilation=dilation, groups=WIDTH)
        self.act, self.minus = act, minus

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.conv(x.transpose(1, 2)))
        return x + (y[..., : -self.pad] if self.minus else y[..., : x.shape[1]]).transpose(1, 2)


class Two(nn.Module):
    """Padded once, then two convolutions with an activation between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(WIDTH, WIDTH, 2), nn.Conv1d(WIDTH, WIDTH, 3, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(F.pad(x.transpose(1, 2), (5, 0))))).transpose(1, 2)


class Before(nn.Module):
    """The token before each; before the first a value of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.cat([self.first.expand(x.shape[0], 1, -1), x[:, :-1]], 1)


def taps(x: Tensor) -> Tensor:
    padded, S = F.pad(x, (0, 0, 2, 0)), x.shape[1]
    return x + 0.5 * padded[:, :S] + 0.3 * padded[:, 1 : S + 1] - 0.2 * padded[:, 2:]


def unfolded(x: Tensor) -> Tensor:
    """Each token's last three at once, weighed by the token itself."""
    S = x.shape[1]
    windows = F.pad(x.transpose(1, 2), (2, 0))[..., -(S + 2) :].unfold(-1, 3, 1).transpose(1, 2)
    return x + (windows * x[..., :3].softmax(-1).unsqueeze(2)).sum(-1)


MIXES: dict[str, Callable[[], Mix]] = {
    "running sum": lambda: lambda x: x + 0.1 * x.cumsum(1),
    "running mean": lambda: lambda x: x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None],
    "shift": lambda: lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1],
    "shift by padding less than nothing": lambda: lambda x: x + F.pad(x, (0, 0, 1, -1)),
    "shift after a learned value": Before,
    "taps": lambda: taps,
    "unfolded windows": lambda: unfolded,
    "convolution": Convolution,
    "convolution, activation, cut": lambda: Convolution(F.silu),
    "dilated convolution": lambda: Convolution(dilation=2),
    "convolution cut from the end": lambda: Convolution(minus=True),
    "two convolutions": Two,
}


def mixed(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Mixed(MIXES[name]()).eval()


@pytest.mark.parametrize("name", MIXES)
def test_what_a_step_remembers_takes_the_place_of_earlier_tokens(name: str) -> None:
    """Rows of different length, prefilled and decoded, against the full forward."""
    check(traced(mixed(name)))


class Placed(nn.Module):
    """Positions count the real tokens so far, by id; a mask hides the others in attention and convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.mix = Model(Written), Convolution()

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        real = (ids != 3).int()
        x = self.model.embed(ids) + self.model.place(real.cumsum(1) * real)
        hidden = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        seen = ~hidden & attention_mask[:, None, None].bool()
        for block in self.model.blocks:
            x = self.mix(x * attention_mask[..., None])
            q, k, v = block.attention.heads(x)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            x = x + block.attention.out(y.transpose(1, 2).flatten(2))
        return self.model.head(x)


def test_rows_padded_on_the_left_remember_as_the_full_forward_does() -> None:
    torch.manual_seed(0)
    examples = (torch.randint(2, 31, (2, 9)), torch.ones(2, 9, dtype=torch.int64))
    model = modpass.trace(Placed().eval(), examples)
    ids, mask = torch.randint(4, 31, (3, LENGTH)), torch.ones(3, LENGTH, dtype=torch.int64)
    for row, pad in enumerate((0, 2, 4)):
        ids[row, :pad], mask[row, :pad] = 3, 0
    logits, positions, _ = generated(model, ids, torch.tensor([7, 7, 7]), mask)
    wanted = full_forward(model, ids, mask)
    for row in range(3):
        assert float((logits[row] - wanted[row, positions[row]]).abs().max()) < 1e-4


@pytest.mark.parametrize("capacity", [0.125, 0.5])
def test_routed_blocks_go_with_what_is_remembered_outside_them(capacity: float) -> None:
    routed = modpass.mod_transform(
        mixed("convolution"), capacity, selection="causal", example_inputs=(torch.randint(2, 31, (2, 9)),)
    )
    for block in routed.routed_blocks.values():
        block.max_sequence = LENGTH
        torch.nn.init.normal_(block.router.weight)
    assert [p.name for p in decode_step(routed, batch=1, max_sequence=LENGTH).info.states] == [
        "mix.window",
        "mix.window_1",
    ]
    check(routed)


def test_rows_that_are_not_live_keep_what_they_remember() -> None:
    step = decode_step(traced(mixed("running sum")), batch=2, max_sequence=8)
    state, ids = step.state(), torch.tensor([[5], [6]])
    step.advance({"ids": ids}, torch.tensor([0, 0]), state)
    names = [s.name for s in step.info.states]
    before = {n: state[n].clone() for n in names}
    step.advance({"ids": ids, "live": torch.tensor([True, False])}, torch.tensor([1, 0]), state)
    for name in names:
        assert not torch.equal(state[name][0], before[name][0])
        assert torch.equal(state[name][1], before[name][1])


def test_a_window_is_as_wide_as_the_convolution_looks_back() -> None:
    first = prefill(traced(mixed("dilated convolution")), batch=3, sequence=5, max_sequence=8)
    assert [s.shape for s in first.info.states] == [(3, WIDTH, 4)] * 2
    assert first.info.states == decode_step(traced(mixed("dilated convolution")), batch=3, max_sequence=8).info.states


@pytest.mark.parametrize("backend", [None, "device"])
def test_a_session_carries_what_is_remembered(backend: str | None, tmp_path: Path) -> None:
    """Prompts shorter and longer than the prefill; the CUDA backend's memory, tried on the CPU."""
    model = traced(mixed("two convolutions"))
    export_decoder(model, tmp_path / "d", batch=2, prompt=4, max_sequence=LENGTH)
    session = DecoderSession(tmp_path / "d", OnnxRuntimeCudaBackend("cpu") if backend else None)
    prompts = [[5, 9, 11, 30, 7, 2], [7, 8]]
    found = session.generate(prompts, 6)
    for prompt, made in zip(prompts, found.tokens, strict=True):
        ids = list(prompt)
        for _ in range(6):
            ids.append(int(full_forward(model, torch.tensor([ids]))[0, -1].argmax()))
        assert made == ids[len(prompt) :]
    assert session.generate(prompts, 6).tokens == found.tokens  # nothing of the first is left
    caches = sum(session.backend.arrays[c.name].nbytes for c in session.manifest.all_caches())
    assert session.cache_bytes == caches + 2 * 2 * WIDTH * 5 * 4


class Later(nn.Module):
    """Looks at the next token too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        (Later(), "aten.conv1d.default convolves over tokens"),
        (lambda x: x + F.pad(x, (0, 0, 1, 0), value=1.0)[:, :-1], "aten.pad.default shifts the sequence"),
        (lambda x: x + F.pad(x, (0, 0, 0, 1))[:, 1:], "aten.pad.default shifts the sequence"),
        (lambda x: x + F.pad(x, (0, 0, 1, 1))[:, 2:], "aten.pad.default shifts the sequence"),
        (lambda x: x + F.pad(x, (0, 0, 1, 0)).flip(1)[:, :-1], "aten.pad.default shifts the sequence"),
        (lambda x: x + x.flip(1).cumsum(1).flip(1), "aten.flip.default runs along the sequence"),
        (lambda x: x + x.cumprod(1), "aten.cumprod.default runs along the sequence"),
        (lambda x: x + torch.cat([x[:, 1:], x[:, :1]], 1), "aten.slice.Tensor takes the sequence apart"),
        (lambda x: x + torch.cat([x[:, :1], x[:, :-1]], 1), "aten.slice.Tensor takes the sequence apart"),
        (lambda x: x[:, : x.shape[1] // 4 * 4].repeat(1, 2, 1)[:, : x.shape[1]], "into groups of 4 tokens"),
    ],
    ids=[
        "both ways",
        "ones first",
        "shift back",
        "next",
        "turned",
        "from the end",
        "product",
        "roll",
        "held",
        "groups",
    ],
)
def test_what_cannot_be_remembered_is_refused_by_the_operator(mix: Mix, words: str) -> None:
    with pytest.raises(BlockError, match=words):
        decode_step(traced(Mixed(mix)), batch=1, max_sequence=LENGTH)


def test_a_block_that_holds_such_an_operator_is_not_routed() -> None:
    class Inside(Written):
        def __init__(self) -> None:
            super().__init__()
            self.mix = Convolution()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.mix(x))

    with pytest.raises(BlockError, match=r"aten.conv1d.default makes a dim of S \+ 2"):
        modpass.mod_transform(Model(Inside).eval(), 0.5, example_inputs=(torch.randint(2, 31, (2, 9)),))
