"""MLPs on images: tokens in two dims, channels first or last, after convolutions that stay dense."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modpass
from modpass.blocks import find_blocks
from modpass.errors import BlockError
from modpass.exporters import FixedShape, export_onnx, verify
from modpass.reference import reference_choice
from modpass.training import calibrate, loss_sensitivity

C = 12


class Stage(nn.Module):
    """A block that gives the two terms of its last sum apart, so that a slow loop can put them together."""

    last = False  # channels

    def terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        residual, added = self.terms(x)
        out = residual + added
        return out.permute(0, 3, 1, 2) if self.last else out


class ConvNeXt(Stage):
    """A depthwise convolution, then an MLP on channels last: the MLP reads what the convolution made."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(C, C, 3, padding=1, groups=C), nn.LayerNorm(C)
        self.up, self.down, self.scale = nn.Linear(C, 2 * C), nn.Linear(2 * C, C), nn.Parameter(torch.rand(C))

    def terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x, (self.scale * self.down(F.gelu(self.up(h)))).permute(0, 3, 1, 2)


class Pointwise(Stage):
    """1 x 1 convolutions with batch norm, after a local residual and a gate of the whole image."""

    def __init__(self) -> None:
        super().__init__()
        self.local, self.norm, self.squeeze = nn.Conv2d(C, C, 3, padding=1), nn.BatchNorm2d(C), nn.Linear(C, C)
        self.up, self.down, self.scale = (
            nn.Conv2d(C, 2 * C, 1),
            nn.Conv2d(2 * C, C, 1),
            nn.Parameter(torch.rand(C, 1, 1)),
        )
        nn.init.uniform_(self.norm.running_mean)  # type: ignore[arg-type]

    def terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.local(x)
        whole = self.squeeze(x.mean((2, 3)))[:, :, None, None].sigmoid()
        return x, self.scale * self.down(F.gelu(self.up(self.norm(x)))) * whole


class ChannelsLast(Stage):
    """Attention over all places and an MLP, inside a layout of its own, as ViTDet's."""

    last = True

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.mlp = nn.Linear(C, 3 * C), nn.Sequential(nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C))

    def terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.permute(0, 2, 3, 1)
        q, k, v = self.qkv(self.norm1(x)).flatten(1, 2)[:, None].chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v)[:, 0].view_as(x)
        return x, self.mlp(self.norm2(x))


class Placed(Pointwise):
    """What is added to every place before the MLP is a value of its own for each."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(1, C, 6, 4))

    def terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.down(F.gelu(self.up(x + self.places)))


KINDS: list[type[Stage]] = [ConvNeXt, Pointwise, ChannelsLast, Placed]


class Net(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem, self.blocks = nn.Conv2d(3, C, 2, stride=2), nn.ModuleList(block() for _ in range(3))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.stem(pixels)
        for block in self.blocks:
            x = block(x)
        return x.flatten(2).transpose(1, 2)


def image(rows: int = 2, height: int = 12, width: int = 8) -> Tensor:
    return torch.randn(rows, 3, height, width, generator=torch.Generator().manual_seed(height))


def routed(block: type[nn.Module], capacity: float = 0.25, **options: Any) -> modpass.RoutedModel:
    options = {"every": 1, "parts": "mlp", "example_inputs": (image(),), **options}
    return modpass.mod_transform(Net(block).eval(), capacity, **options)


@torch.no_grad()
def by_hand(model: Net, routers: dict[str, Tensor], pixels: Tensor, capacity: float, gate: str) -> Tensor:
    """Place after place, row after row."""
    x = model.stem(pixels)
    for n, block in enumerate(model.blocks):
        assert isinstance(block, Stage)
        before, added = block.terms(x)
        if not block.last:
            before, added = before.permute(0, 2, 3, 1), added.permute(0, 2, 3, 1)
        rows, height, width, _ = before.shape
        out = before.clone()
        for b in range(rows):
            places = [(i, j) for i in range(height) for j in range(width)]
            scores = [float((before[b, i, j] * routers[f"blocks.{n}"]).sum()) for i, j in places]
            for place in reference_choice(scores, capacity):
                r = {"unit": 1.0, "linear": scores[place], "sigmoid": 1 / (1 + math.exp(-scores[place]))}[gate]
                i, j = places[place]
                out[b, i, j] = before[b, i, j] + r * added[b, i, j]
        x = out.permute(0, 3, 1, 2)
    return x.flatten(2).transpose(1, 2)


@pytest.mark.parametrize(("capacity", "gate"), [(1.0, "unit"), (0.25, "linear"), (0.5, "sigmoid"), (0.01, "linear")])
@pytest.mark.parametrize("block", KINDS)
def test_it_equals_a_loop_over_places_at_other_sizes_too(block: type[Stage], capacity: float, gate: str) -> None:
    model = routed(block, capacity, gate=gate)
    weights = {n: b.router.weight.detach() for n, b in model.routed_blocks.items()}
    assert list(weights) == ["blocks.0", "blocks.1", "blocks.2"]
    others = [image(3, 10, 14), image(1, 16, 6)] if block is not Placed else []
    for pixels in (image(), *others):
        wanted = by_hand(Net(block).eval(), weights, pixels, capacity, gate)
        with torch.no_grad():
            found = model(pixels)
        assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("block", KINDS)
def test_with_every_token_it_is_the_dense_model_with_its_gradients(block: type[Stage]) -> None:
    dense, model, pixels = Net(block).eval(), routed(block, 1.0, gate="unit"), image()
    for each in (dense, model):
        each(pixels).square().sum().backward()
    own = dict(model.named_parameters())
    used = {n: p for n, p in dense.named_parameters() if p.grad is not None}
    assert any("down" in n or "mlp" in n for n in used)
    for name, parameter in used.items():
        assert torch.allclose(own[name].grad, parameter.grad, rtol=1e-4, atol=1e-4), name  # type: ignore[arg-type]


@pytest.mark.parametrize("block", KINDS)
def test_it_exports_with_the_same_choices(block: type[Stage], tmp_path: Path) -> None:
    model = routed(block).eval()
    path = tmp_path / "model.onnx"
    export_onnx(model, path, FixedShape(2, None, {"pixels.2": 12, "pixels.3": 8}))
    report = verify(model, path, {"pixels": image()})
    assert max(o.max_rel for o in report.outputs) < 1e-4
    assert report.choices == dict.fromkeys(model.routed_blocks, 1.0)


def test_only_the_mlp_is_routed_and_the_convolution_sees_every_place() -> None:
    model, pixels = routed(ConvNeXt).eval(), image()
    with torch.no_grad():
        before = model(pixels)
        model.get_parameter("blocks.0.depthwise.bias").add_(1.0)
        changed = (model(pixels) - before).abs().amax(-1) > 0
    assert 0 < changed.float().mean() <= 0.75, "passed tokens keep the residual, whatever the convolution says"
    body = str(model.routed_blocks["blocks.0"].body.graph)
    assert "linear" in body
    assert "conv" not in body


def test_a_saved_model_comes_back_the_same(tmp_path: Path) -> None:
    model, pixels = routed(Pointwise).eval(), image(3, 10, 14)
    modpass.save_pretrained(model, tmp_path / "saved")
    loaded = modpass.load(tmp_path / "saved", model=Net(Pointwise).eval())
    with torch.no_grad():
        assert torch.equal(loaded(pixels), model(pixels))


def test_routers_are_calibrated_as_those_of_sequences_are() -> None:
    model, pixels = routed(ConvNeXt, gate="unit").eval(), image(4)
    with torch.no_grad():
        dense = Net(ConvNeXt).eval()(pixels)
        first = (model(pixels) - dense).square().sum()
        calibrate(model, [(pixels,)], score=loss_sensitivity, loss=lambda y, _: y.square().sum(), first_token=False)
        assert (model(pixels) - dense).square().sum() < first


def test_what_can_be_routed_is_named_where_the_whole_block_is_refused() -> None:
    reasons = {s.name: s.reason for s in find_blocks(Net(ConvNeXt).eval(), (image(),)).skipped}
    assert "convolves over tokens (kernel (3, 3))" in reasons["blocks.0"]
    assert reasons["blocks.0"].endswith("; its MLP branch can be routed: parts='mlp'")


class Bottleneck(Stage):
    """One 1 x 1 convolution alone is no MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(C, C, 1), nn.ReLU(), nn.Conv2d(C, C, 3, padding=1), nn.ReLU())
        self.back = nn.Conv2d(C, C, 1)

    def terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.back(self.convs(x))


class ConvolvedLast(Pointwise):
    """The last product looks at its neighbours."""

    def terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, added = super().terms(x)
        return x, self.local(added)


class GroupNormed(Pointwise):
    """A norm over places between the products: what is left after it is one product."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.GroupNorm(1, 2 * C)

    def terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.down(self.between(self.up(x)))


class Shifted(Pointwise):
    """A kernel of 1 with padding and a stride moves places, though sizes stay."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2 * C, C, 1, padding=1, stride=2)

    def terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.down(F.gelu(self.up(x)))


class TwoMlps(Stage):
    """An MLP before a convolution, and one after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.local = Pointwise(), Pointwise(), nn.Conv2d(C, C, 3, padding=1)

    def terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.first.down(F.gelu(self.first.up(x)))
        x = x + self.local(x)
        return x, self.second.down(F.gelu(self.second.up(x)))


class ReadTwice(ConvNeXt):
    """A statistic over all places between the products needs the first of them everywhere (ConvNeXt V2)."""

    def terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.gelu(self.up(self.norm(self.depthwise(x).permute(0, 2, 3, 1))))
        whole = h.norm(dim=(1, 2), keepdim=True)
        return x, self.down(h * whole / (whole.mean(-1, keepdim=True) + 1e-6)).permute(0, 3, 1, 2)


class AddedTwice(Pointwise):
    """The branch is a term of two sums."""

    def terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        added = self.down(F.gelu(self.up(x)))
        return x + added, added


class Parallel(Pointwise):
    """Two MLPs of one residual: neither sum is passed by all."""

    def terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.down(F.gelu(self.up(x))), self.down(F.relu(self.up(x)))


class Returned(Stage):
    """What the first product makes leaves the block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Pointwise()

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner.up(x)
        return torch.cat([x + self.inner.down(F.gelu(h)), h.mean(1, keepdim=True)], 1)[:, :C] + 0 * h[:, :1]


NO_MLP = "it has no MLP, a residual branch that ends in two products that are seen to work on each place by itself"


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Bottleneck, NO_MLP),
        (ConvolvedLast, NO_MLP),
        (GroupNormed, NO_MLP),
        (ReadTwice, NO_MLP),
        (AddedTwice, NO_MLP),
        (Parallel, NO_MLP),
        (Returned, NO_MLP),
        (TwoMlps, "it has 2 branches that could be its mlp"),
    ],
)
def test_what_is_no_mlp_of_single_places_is_refused(block: type[Stage], reason: str) -> None:
    with pytest.raises(BlockError, match=reason):
        routed(block)


def test_a_convolution_that_moves_places_is_refused_though_sizes_stay() -> None:
    program = torch.export.export(Net(Shifted).eval(), (image(2, 6, 6),))
    with pytest.raises(BlockError, match=NO_MLP):
        modpass.mod_transform(program, 0.25, parts="mlp")


def test_a_program_of_one_size_alone_is_routed_at_that_size() -> None:
    pixels = image()
    fixed = modpass.mod_transform(torch.export.export(Net(ConvNeXt).eval(), (pixels,)), 0.25, every=1, parts="mlp")
    model = routed(ConvNeXt)
    fixed.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.allclose(fixed(pixels), model(pixels), atol=1e-6)


class Film(nn.Module):
    """Frames first: the batch is the second dim while blocks run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Frames() for _ in range(2))

    def forward(self, film: Tensor) -> Tensor:
        x = film.transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return x.transpose(0, 1)


class Frames(ChannelsLast):
    last = False

    def terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return x, self.mlp(self.norm2(x))


def test_rows_of_the_batch_do_not_compete() -> None:
    with pytest.raises(BlockError, match=r"the first dim of its stream, s\d+, is not the batch of an input"):
        modpass.mod_transform(Film().eval(), 0.25, parts="mlp", example_inputs=(torch.randn(2, 3, 5, C),))


def test_a_block_that_is_called_twice_is_routed_twice() -> None:
    class Twice(Net):
        def forward(self, pixels: Tensor) -> Tensor:
            x = self.stem(pixels)
            for _ in range(2):
                for block in self.blocks:
                    x = block(x)
            return x.flatten(2).transpose(1, 2)

    dense, pixels = Twice(ConvNeXt).eval(), image()
    model = modpass.mod_transform(dense, 1.0, every=1, parts="mlp", gate="unit", example_inputs=(pixels,))
    assert len(model.routed_blocks) == 6
    with torch.no_grad():
        assert torch.allclose(model(pixels), dense(pixels), atol=1e-5)
        assert torch.allclose(model(image(3, 10, 14)), dense(image(3, 10, 14)), atol=1e-5)


@pytest.mark.parametrize("shape", [(1, C, 1, 4), (C, 1, 4)])
def test_a_table_with_a_value_for_each_place_stays_outside(shape: tuple[int, ...]) -> None:
    class Weighed(ConvNeXt):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(shape))

        def terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x, added = super().terms(x)
            return x, added * self.table

    program = torch.export.export(Net(Weighed).eval(), (image(2, 2, 8),))
    with pytest.raises(BlockError, match=NO_MLP):
        modpass.mod_transform(program, 0.5, parts="mlp")


def test_a_mask_of_words_is_none_of_places() -> None:
    class Described(Net):
        def forward(self, pixels: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(pixels) + attention_mask.float().mean()

    example = {"pixels": image(), "attention_mask": torch.ones(2, 24, dtype=torch.int64)}
    model = modpass.mod_transform(Described(ConvNeXt).eval(), 0.25, every=1, parts="mlp", example_inputs=example)
    with torch.no_grad():
        wanted = routed(ConvNeXt).requires_grad_(False)
        wanted.load_state_dict(model.state_dict())
        for words in (24, 7):
            found = model(image(), torch.zeros(2, words, dtype=torch.int64))
            assert torch.allclose(found, wanted(image()), atol=1e-6)
