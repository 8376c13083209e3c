"""Branches of blocks that cannot be routed as a whole: windows mix their tokens, their MLPs do not."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modpass
from modpass.bench.coverage_branch import copy_dense
from modpass.blocks import locate
from modpass.errors import BlockError
from modpass.reference import Setting
from modpass.tracing import capture
from modpass.transform import route_traced
from tests.branch_reference import branch_reference
from tests.test_transform import relative, set_blocks, settings_of
from tests.zoo import InnerRotaryAttention

WINDOW, WIDTH = 4, 16


class Windowed(nn.Module):
    """Attention in windows, then an MLP; ``length`` fixes the sequence to a number, as an image's size does."""

    def __init__(self, length: int | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2, self.length = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), length
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = self.make_mlp()

    def make_mlp(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def attention(self, x: Tensor) -> Tensor:
        B, S, D = x.shape
        S = self.length or S
        q, k, v = (t[:, None] for t in self.qkv(x.reshape(B * (S // WINDOW), WINDOW, D)).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v)[:, 0]).reshape(B, S, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ConvolvedMlp(Windowed):
    """An MLP that looks at its neighbours, as SegFormer's does."""

    def make_mlp(self) -> nn.Module:
        return TokenConv()


class TokenConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.conv = nn.Linear(WIDTH, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.up(x).transpose(1, 2)).transpose(1, 2)


class TwoMlps(Windowed):
    """The two MLPs are neighbours, and so one branch."""

    def __init__(self, length: int | None = None) -> None:
        super().__init__(length)
        self.more = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.more(x).relu()


class SplitMlps(Windowed):
    """An MLP before the windows, and one after."""

    def __init__(self, length: int | None = None) -> None:
        super().__init__(length)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.first(x).relu())


class ConvolvedAfter(nn.Module):
    """Attention over all tokens, then a convolution over them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(48), nn.LayerNorm(48)
        self.attn, self.conv = InnerRotaryAttention(48, 4), nn.Conv1d(48, 48, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.conv(self.norm2(x).transpose(1, 2)).transpose(1, 2)


def stack(block: type[nn.Module], *args: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block(*args) for _ in range(3))).eval()


def example(tokens: int = 12) -> tuple[Tensor]:
    return (torch.randn(2, tokens, WIDTH),)


@cache
def pair(length: int | None) -> tuple[nn.Module, modpass.RoutedModel]:
    model = stack(Windowed, length)
    return model, modpass.mod_transform(model, 0.25, every=1, parts="mlp", example_inputs=example())


@pytest.mark.parametrize(("capacity", "gate"), [(0.25, "linear"), (0.5, "sigmoid"), (1.0, "unit")])
@pytest.mark.parametrize("length", [None, 12])
def test_the_mlp_of_a_windowed_block_equals_the_slow_reference(length: int | None, capacity: float, gate: str) -> None:
    model, routed = pair(length)
    assert list(routed.routed_blocks) == ["0", "1", "2"]
    set_blocks(routed, capacity, gate)
    (x,) = example(12 if length else 20)
    branches = {n: (f"{n}.norm2", f"{n}.mlp") for n in routed.routed_blocks}
    with torch.no_grad():
        found, dense = routed(x), model(x)
        with branch_reference(model, branches, settings_of(routed)) as reference:
            wanted = reference(x)
    assert relative(found, wanted) < 1e-4
    if capacity == 1.0:
        assert torch.equal(found, dense)
    else:
        assert relative(found, dense) > 1e-3, "routing changed nothing"


@pytest.mark.parametrize("length", [None, 12])
def test_only_the_mlp_lies_in_the_body_and_runs_on_the_chosen_tokens(length: int | None) -> None:
    _, routed = pair(length)
    set_blocks(routed, 0.25, "linear")
    block = routed.routed_blocks["1"]
    assert set(block.owned) == {f"{n}.{p}" for n in ("norm2", "mlp.0", "mlp.2") for p in ("weight", "bias")}
    seen: list[torch.Size] = []
    handle = block.body.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    with torch.no_grad():
        routed(*example())
    handle.remove()
    assert seen == [torch.Size([2, 3, WIDTH])]


@pytest.mark.parametrize("length", [None, 12])
def test_the_branch_of_a_windowed_block_passes_the_check_by_values(length: int | None) -> None:
    routed = modpass.mod_transform(stack(Windowed, length), parts="mlp", check=True, example_inputs=example())
    assert list(routed.routed_blocks) == ["1"]


def test_onnx_runtime_agrees_on_the_branch_of_a_windowed_block(tmp_path: Path) -> None:
    from modpass.exporters import FixedShape, export_onnx, verify

    _, routed = pair(12)
    set_blocks(routed, 0.25, "linear")
    export_onnx(routed, tmp_path / "m.onnx", FixedShape(batch=2))
    report = verify(routed, tmp_path / "m.onnx")
    report.check(1e-4, 1.0)
    assert set(report.choices) == {"0", "1", "2"}


def test_the_branch_of_a_windowed_block_is_saved_and_loaded(tmp_path: Path) -> None:
    model, routed = pair(12)
    modpass.save_pretrained(routed, tmp_path / "m")
    loaded = modpass.load(tmp_path / "m", model)
    (x,) = example()
    with torch.no_grad():
        assert torch.equal(loaded(x), routed.eval()(x))


@pytest.mark.parametrize("length", [None, 12])
def test_a_refusal_says_which_branch_can_be_routed(length: int | None) -> None:
    skipped = modpass.find_blocks(stack(Windowed, length), example()).skipped
    assert [s.parts for s in skipped] == [("mlp",)] * 3
    assert all(s.reason.endswith("windows or pooled keys; its MLP branch can be routed: parts='mlp'") for s in skipped)
    with pytest.raises(BlockError, match="its MLP branch can be routed: parts='mlp'"):
        modpass.mod_transform(stack(Windowed, length), example_inputs=example())


def test_an_attention_branch_beside_a_convolution_can_be_routed() -> None:
    model, inputs = stack(ConvolvedAfter), (torch.randn(2, 9, 48),)
    assert all(
        s.reason.endswith("; its attention branch can be routed: parts='attention'")
        for s in modpass.find_blocks(model, inputs).skipped
    )
    traced = capture(model, inputs)
    found = locate(traced, parts="attention")
    dense = copy_dense(traced, found)
    routed = route_traced(traced, found, 0.4, every=1, parts="attention")
    settings = {n: Setting(0.4, "linear", b.router.weight) for n, b in routed.routed_blocks.items()}
    with torch.no_grad():
        wanted = dense.run(settings, {"input": inputs[0]})[0]
        branches = {n: (f"{n}.norm1", f"{n}.attn") for n in settings}
        with branch_reference(model, branches, settings) as reference:
            assert relative(wanted, reference(*inputs)) < 1e-4, "the two references differ"
        assert relative(routed(*inputs), wanted) < 1e-4
        assert relative(wanted, model(*inputs)) > 1e-3


def test_neighbouring_mlps_after_windows_are_one_branch() -> None:
    model = stack(TwoMlps)
    routed = modpass.mod_transform(model, 1.0, every=1, gate="unit", parts="mlp", example_inputs=example())
    assert all("more.weight" in b.owned and "mlp.0.weight" in b.owned for b in routed.routed_blocks.values())


@pytest.mark.parametrize(
    ("block", "parts", "reason"),
    [
        (ConvolvedMlp, "mlp", "parts='mlp': aten.conv1d.default convolves over tokens"),
        (Windowed, "attention", "parts='attention': aten.reshape.default makes a dim of"),
        (SplitMlps, "mlp", "parts='mlp': it has 2 branches that could be its mlp"),
    ],
)
def test_a_branch_whose_tokens_meet_is_refused_as_the_block_is(block: type[nn.Module], parts: Any, reason: str) -> None:
    model = stack(block)
    with pytest.raises(BlockError, match=r"no block can be routed") as e:
        modpass.mod_transform(model, 0.5, parts=parts, example_inputs=example())
    assert [s.reason[: len(reason)] for s in e.value.skipped] == [reason] * 3
    if parts == "mlp":
        assert not any("can be routed" in s.reason for s in modpass.find_blocks(model, example()).skipped)


def test_a_branch_that_works_with_a_size_from_outside_is_refused_in_words() -> None:
    from modpass.bench.coverage_models import make_model, with_inputs

    made = with_inputs(make_model("image", "mobilevit"))  # its patches are folded by sizes that it worked out before
    found = locate(capture(made.model, made.example_inputs))
    assert len(found) == 6
    assert len(found.skipped) == 5
