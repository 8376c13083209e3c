"""Blocks whose sequence the trace fixed: which of the model's values are their inputs."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import Tensor, nn

import modpass
from modpass.errors import BlockError
from modpass.reference import routed_reference
from tests.test_transform import relative, settings_of
from tests.zoo import InnerRotaryAttention, PreNorm


def patches(conv: nn.Module, image: Tensor) -> Tensor:
    """Tokens of an image of one size, which fixes their number in the trace."""
    if image.shape[-2:] != (20, 20):
        raise ValueError("the image must be 20 by 20")
    return conv(image).flatten(2).transpose(1, 2)


class Modulated(nn.Module):
    """A diffusion transformer's block: shift, scale and gate of each branch come from outside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attn = InnerRotaryAttention(width, 4)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(
        self, x: Tensor, shift1: Tensor, scale1: Tensor, gate1: Tensor, scale2: Tensor, gate2: Tensor
    ) -> Tensor:
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2))


class Diffusion(nn.Module):
    """Patches of an image, so that the trace fixes the sequence; modulations start at zero."""

    def __init__(self, width: int = 48, layers: int = 4) -> None:
        super().__init__()
        self.patch, self.condition = nn.Conv2d(3, width, 4, 4), nn.Linear(8, width)
        self.place = nn.Parameter(torch.randn(25, width))
        self.modulation = nn.ModuleList(nn.Linear(width, 5 * width) for _ in range(layers))
        self.blocks = nn.ModuleList(Modulated(width) for _ in range(layers))
        for layer in self.modulation:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x, c = patches(self.patch, image) + self.place, self.condition(label)
        for modulation, block in zip(self.modulation, self.blocks, strict=True):
            x = block(x, *modulation(nn.functional.silu(c))[:, None].chunk(5, -1))
        return x


def test_modulations_that_start_at_zero_are_told_apart() -> None:
    torch.manual_seed(0)
    model = Diffusion().eval()
    routed = modpass.mod_transform(model, 0.5, example_inputs=(torch.randn(2, 3, 20, 20), torch.randn(2, 8)))
    assert list(routed.routed_blocks) == ["blocks.1", "blocks.3"]
    with torch.no_grad():
        for layer in model.modulation:  # shared with the routed model
            nn.init.normal_(layer.weight, std=0.5)
        image, label = torch.randn(3, 3, 20, 20), torch.randn(3, 8)
        with routed_reference(model, settings_of(routed)) as reference:
            wanted = reference(image, label)
        assert relative(routed(image, label), wanted) < 1e-4
        assert relative(wanted, model(image, label)) > 1e-3


def test_a_model_in_training_mode_with_dropout_is_reopened() -> None:
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80, image_size=32, patch_size=8,
        hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3,
    )  # fmt: skip
    model = transformers.ViTModel(config).train()
    before = copy.deepcopy(model.state_dict())
    assert len(modpass.find_blocks(model)) == 2
    assert model.training
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


class TwoMasks(nn.Module):
    """Two inputs that are equal in the example, and not elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.place = nn.Conv2d(3, 48, 4, 4), nn.Parameter(torch.randn(25, 48))
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(2))

    def forward(self, image: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        x = patches(self.patch, image) + self.place
        for block in self.blocks:
            x = block(x, rows, columns)
        return x


class MaskedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = InnerRotaryAttention(48, 4)

    def forward(self, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return x + self.attn(x) * rows[:, :, None] + columns[:, :, None]


def test_inputs_that_are_equal_in_the_example_are_refused_where_noise_cannot_tell() -> None:
    image, ones = torch.randn(2, 3, 20, 20), torch.ones(2, 25, dtype=torch.int64)
    with pytest.raises(BlockError, match=r"could be any of rows, columns, which are equal on the example inputs"):
        modpass.mod_transform(TwoMasks(), 0.5, example_inputs=(image, ones, ones.clone()))
    other = torch.randint(0, 2, (2, 25))
    assert len(modpass.find_blocks(TwoMasks(), (image, ones, other))) == 2


class HidesPatches(nn.Module):
    """A masked autoencoder's encoder: noise of its own says which patches go on."""

    def __init__(self, width: int = 48, layers: int = 4) -> None:
        super().__init__()
        self.patch, self.place = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.randn(25, width))
        self.blocks = nn.ModuleList(PreNorm(InnerRotaryAttention(width, 4), width) for _ in range(layers))

    def forward(self, image: Tensor) -> Tensor:
        x = patches(self.patch, image) + self.place
        order = torch.rand(x.shape[:2]).argsort(1)[:, :13]
        x = x.gather(1, order.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return x


def test_a_model_that_draws_its_patches_is_reopened() -> None:
    torch.manual_seed(0)
    model = HidesPatches().eval()
    routed = modpass.mod_transform(model, 0.25, example_inputs=(torch.randn(2, 3, 20, 20),))
    assert list(routed.routed_blocks) == ["blocks.1", "blocks.3"]
    image = torch.randn(3, 3, 20, 20)
    with torch.no_grad():
        torch.manual_seed(7)
        found = routed(image)
        torch.manual_seed(7)
        with routed_reference(model, settings_of(routed)) as reference:
            assert relative(found, reference(image)) < 1e-4


def test_finding_blocks_leaves_the_random_state_as_it_was() -> None:
    model = HidesPatches(layers=2).eval()
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    modpass.find_blocks(model, (torch.ones(2, 3, 20, 20),))
    assert torch.equal(torch.rand(1), wanted)
