"""Blocks run on permuted and on fewer tokens: what passes, and what is refused with which words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import modpass
from modpass.errors import BlockError
from modpass.reference import routed_reference
from tests.test_blocks import Convolution, Mixer, Scan
from tests.test_transform import inputs_of, relative, settings_of, transform
from tests.zoo import ZOO, Decoder, InnerRotaryAttention, PreNorm, first, make, tokens


@torch.library.custom_op("modpass_test::swish", mutates_args=())
def swish(x: Tensor) -> Tensor:
    """Keeps tokens apart, which no table of operators can know."""
    return x * torch.sigmoid(x)


@torch.library.custom_op("modpass_test::carry", mutates_args=())
def carry(x: Tensor) -> Tensor:
    """Hands a tenth of each token on to the next one."""
    return x + 0.1 * x.roll(1, 1)


@torch.library.custom_op("modpass_test::centre", mutates_args=())
def centre(x: Tensor) -> Tensor:
    """Subtracts the mean over the batch."""
    return x - x.mean(0, keepdim=True)


@torch.library.custom_op("modpass_test::selective_scan", mutates_args=())
def selective_scan(x: Tensor, decay: Tensor) -> Tensor:
    """A recurrence along the sequence, fused into one operator as Mamba's is."""
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + x[:, t]
        out.append(state)
    return torch.stack(out, 1)


for operator in (swish, carry, centre):
    operator.register_fake(lambda x: torch.empty_like(x))
selective_scan.register_fake(lambda x, decay: torch.empty_like(x))


class FusedScan(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.decay, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return selective_scan(self.value(x), torch.sigmoid(self.decay(x)))


class UnrolledScan(nn.Module):
    """The same recurrence token by token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.decay, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        decay, value = torch.sigmoid(self.decay(x)), self.value(x)
        state, out = torch.zeros_like(value[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + value[:, t]
            out.append(state)
        return torch.stack(out, 1)


def mixed(mix: Callable[[Tensor], Tensor]) -> Decoder:
    """Blocks that hold attention and, in it, ``mix``."""
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.attend, self.mix = InnerRotaryAttention(width, heads), Mixer(mix)

        def forward(self, x: Tensor) -> Tensor:
            return self.attend(x) + self.mix(x)

    return Decoder(Attention, layers=2).eval()


def reasons(model: nn.Module, check: bool | None) -> list[str]:
    blocks = modpass.find_blocks(model, (tokens(2, 11),), check=check)
    assert len(blocks) + len(blocks.skipped) == 2
    return [s.reason for s in blocks.skipped]


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *((name, seed) for name in ("llama", "bert") for seed in range(3)),
        ("dinov2", 0),
        ("encoder-sbd", 0),
        ("alibi", 0),
    ],
)
def test_attention_blocks_pass_the_check(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = ZOO[name].make().train()
    blocks = modpass.find_blocks(model, ZOO[name].example_inputs(), check=True)
    assert len(blocks) == 4, [s.reason for s in blocks.skipped]
    assert model.training


BACK_DOORS: dict[str, Callable[[Tensor], Tensor]] = {
    "pairwise mean": lambda x: (x[:, :, None] * x[:, None]).permute(0, 1, 3, 2).mean(-1),
    "sum over all tokens": lambda x: torch.ones(x.shape[1], x.shape[1]) @ x,
    "scores without softmax": lambda x: (x @ x.transpose(1, 2)).relu() @ x,
}


@pytest.mark.parametrize("kind", BACK_DOORS)
def test_mixing_that_the_analysis_lets_through_is_found_by_the_check(kind: str) -> None:
    model = mixed(BACK_DOORS[kind])
    assert reasons(model, check=None) == []
    found = reasons(model, check=True)
    assert len(found) == 2
    for reason in found:
        assert "tokens changes by" in reason
        assert "tokens meet outside attention, first in aten." in reason
    with pytest.raises(BlockError, match="tokens meet outside attention"):
        modpass.mod_transform(model, 0.5, example_inputs=(tokens(2, 11),), check=True)


def test_what_is_known_to_mix_is_refused_without_a_run() -> None:
    pairwise = mixed(lambda x: (x[:, :, None] * x[:, None]).mean(2))
    for check in (None, True, False):
        assert all("runs along the sequence" in r for r in reasons(pairwise, check))
        assert all("convolves over tokens" in r for r in reasons(Decoder(Convolution, layers=2), check))
        assert all("cumsum.default runs along the sequence" in r for r in reasons(Decoder(Scan, layers=2), check))


def test_a_scan_unrolled_over_its_tokens_is_refused() -> None:
    found = reasons(Decoder(UnrolledScan, layers=2), None)
    assert len(found) == 2
    assert all("its sequence stays fixed to 11" in r for r in found)


@pytest.mark.parametrize(
    ("attention", "first_in"),
    [
        (lambda w, h: Mixer(carry), "first in modpass_test.carry.default"),
        (FusedScan, "first in modpass_test.selective_scan.default"),
        (lambda w, h: Mixer(centre), "first in modpass_test.centre.default"),
    ],
)
def test_an_unknown_operator_that_mixes_is_refused_by_the_check(
    attention: Callable[[int, int], nn.Module], first_in: str
) -> None:
    torch.manual_seed(0)
    found = reasons(Decoder(attention, layers=2), None)
    assert len(found) == 2
    for reason in found:
        assert "is not known to keep tokens apart (node" in reason
        assert "of what it adds to the stream when its tokens come in another order" in reason
        assert first_in in reason


class Swished(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + swish(x)


def test_an_unknown_operator_that_keeps_tokens_apart_is_routed_and_right() -> None:
    torch.manual_seed(0)
    model = Decoder(InnerRotaryAttention)
    model.blocks = nn.ModuleList(Swished(InnerRotaryAttention(48, 4), 48) for _ in range(4))
    with pytest.raises(BlockError, match=r"modpass_test\.swish\.default is not known to keep tokens apart"):
        modpass.mod_transform(model, 0.5, example_inputs=(tokens(2, 11),), check=False)
    routed = modpass.mod_transform(model, 0.5, example_inputs=(tokens(2, 11),))
    assert list(routed.routed_blocks) == ["blocks.1", "blocks.3"]
    ids = tokens(3, 14)
    with torch.no_grad(), routed_reference(model, settings_of(routed)) as reference:
        assert relative(routed(ids), reference(ids)) < 1e-4


def test_a_branch_behind_a_gate_of_zeros_is_checked_all_the_same() -> None:
    class Gated(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.attend, self.gate = InnerRotaryAttention(width, heads), nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.attend(x) + self.gate * carry(x)

    found = reasons(Decoder(Gated, layers=2), None)
    assert len(found) == 2
    assert all("first in modpass_test.carry.default" in r for r in found)


def test_tokens_that_are_alike_in_the_example_do_not_hide_mixing() -> None:
    model = Decoder(lambda w, h: Mixer(carry))
    blocks = modpass.find_blocks(model, (torch.zeros(2, 11, dtype=torch.int64),))
    assert len(blocks) == 0


def test_a_program_without_example_values_cannot_be_checked() -> None:
    model, dim = Decoder(lambda w, h: Mixer(swish)), torch.export.Dim.AUTO
    program = torch.export.export(model, (tokens(2, 11),), dynamic_shapes=({0: dim, 1: dim},), strict=False)
    assert modpass.find_blocks(program).names() == [f"blocks.{i}" for i in range(4)]
    program._example_inputs = None
    blocks = modpass.find_blocks(program)
    assert all("the trace has no example value of the input 'ids'" in s.reason for s in blocks.skipped)
    assert len(blocks.skipped) == 4


def test_a_checked_model_computes_what_an_unchecked_one_does() -> None:
    model = make("llama")
    torch.manual_seed(0)
    plain = transform("llama", model, 0.5)
    torch.manual_seed(0)
    checked = transform("llama", model, 0.5, check=True)
    inputs = inputs_of("llama", 2, 13)
    with torch.no_grad():
        assert torch.equal(first(plain(**inputs)), first(checked(**inputs)))
