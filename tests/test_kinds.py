"""Kinds of models found by measuring every architecture, against the slow reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import modpass
from modpass.errors import BlockError, InputError
from modpass.inputs import infer_inputs
from modpass.reference import Setting, hidden_keys, routed_reference
from tests.kinds import KINDS, ByProducts, EveryExpert, by_einsum, ids, make_kind, without_softmax
from tests.test_transform import relative
from tests.zoo import Decoder, PreNorm, first, tokens


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_equals_the_dense_model_and_the_slow_reference(name: str) -> None:
    model, inputs = make_kind(name), KINDS[name][1]
    routed = modpass.mod_transform(model, 1.0, every=1, gate="unit", example_inputs=inputs(2, 23))
    assert list(routed.routed_blocks) == ["blocks.0", "blocks.1"]
    given = inputs(3, 18)
    with torch.no_grad():
        dense = first(model(**given))
        assert relative(first(routed(**given)), dense) < 1e-5
        for block in routed.routed_blocks.values():
            block.capacity, block.gate = 0.25, "linear"
        settings = {
            n: Setting(0.25, "linear", b.router.weight, b.seq_dim, order=b.order)
            for n, b in routed.routed_blocks.items()
        }
        found = first(routed(**given))
        with routed_reference(model, settings) as reference:
            assert relative(found, first(reference(**given))) < 1e-4
    assert relative(found, dense) > 1e-3, "routing changed nothing"


def test_the_reference_says_where_it_cannot_tell_queries_from_scores() -> None:
    model = ByProducts(without_softmax).eval()
    with (
        hidden_keys([[0, 1]], 12),
        pytest.raises(InputError, match=r"as wide as the sequence is long \(12\)"),
    ):
        model(torch.randn(1, 12, 48))


def test_streams_side_by_side_share_one_router_and_are_shown_as_they_are() -> None:
    model = make_kind("streams in front")
    blocks = modpass.find_blocks(model, ids(2, 23))
    assert blocks[0].stream_shape == "[3, B, S, 48]"
    routed = modpass.mod_transform(model, 0.5, example_inputs=ids(2, 23))
    assert all(b.router.weight.shape == (144,) for b in routed.routed_blocks.values())


def test_a_stream_of_four_dims_without_attention_is_refused() -> None:
    class Pointwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(48, 48)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.up(x).relu()

    model = nn.Sequential(*(Pointwise() for _ in range(2)))
    with pytest.raises(BlockError, match="has no one dim that attention runs over"):
        modpass.mod_transform(model, 0.5, example_inputs=(torch.randn(2, 9, 7, 48),))


class Image(nn.Module):
    """A block ``[B, C, H, W]`` that convolves, and sums in another order of its dims."""

    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(8, 8, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return (x.permute(0, 2, 3, 1) + self.mix(x).relu().permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class FewKeys(nn.Module):
    """Attends to every third token."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(48, 144)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)) for t in self.qkv(x).chunk(3, -1))
        return x + by_einsum(q, k[:, ::3], v[:, ::3]).flatten(2)


@pytest.mark.parametrize(
    ("blocks", "shape", "reason"),
    [
        ([Image(3), Image(3)], (2, 8, 6, 7), r"conv2d\.default convolves over tokens \(kernel \(3, 3\)\)"),
        ([Image(1), Image(1)], (2, 8, 6, 7), "attention runs over; flatten its tokens to one dim"),
    ],
)
def test_images_that_are_not_laid_out_as_a_sequence_are_refused_with_the_reason(
    blocks: list[nn.Module], shape: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(BlockError, match=reason):
        modpass.mod_transform(nn.Sequential(*blocks), 0.5, example_inputs=(torch.randn(shape),))


def test_long_sizes_are_told_by_their_numbers_in_the_example_inputs() -> None:
    class Pieces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut = nn.Conv2d(5, 48, 3, 3)
            self.blocks = nn.ModuleList(FewKeys() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.cut(x).flatten(2).transpose(1, 2)
            for block in self.blocks:
                x = block(x)
            return x

    words = r"over 12 tokens, not over a dim of the stream \(2, 36\) with the example inputs: windows or pooled keys"
    with pytest.raises(BlockError, match=words):
        modpass.mod_transform(Pieces(), 0.5, example_inputs=(torch.randn(2, 5, 18, 18),))


def test_a_quantile_is_worked_out_before_export() -> None:
    routed = modpass.mod_transform(make_kind("quantile"), 0.5, example_inputs=ids(2, 23))
    assert not any(
        n.op == "call_function" and "erfinv" in str(n.target) for graph in routed.graphs() for n in graph.graph.nodes
    )


def test_no_complex_number_is_left() -> None:
    routed = modpass.mod_transform(make_kind("complex rotary"), 0.5, example_inputs=ids(2, 23))
    values = [n.meta.get("val") for graph in routed.graphs() for n in graph.graph.nodes]
    assert not any(v.is_complex() for v in values if isinstance(v, Tensor))


def test_copies_of_tokens_read_token_by_token_are_refused() -> None:
    model = Decoder(lambda w, h: EveryExpert(w, front=False), 2)
    with pytest.raises(BlockError, match="repeats the sequence"):
        modpass.mod_transform(model, 0.5, example_inputs=(tokens(2, 11),))


def test_an_einsum_over_tokens_outside_attention_is_refused() -> None:
    def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bqhd,bhde->bqhe", q, torch.einsum("bkhd,bkhe->bhde", k, v))

    model = Decoder(lambda w, h: ByProducts(linear_attention), 2)
    with pytest.raises(BlockError, match=r"einsum.* sums over tokens outside attention"):
        modpass.mod_transform(model, 0.5, example_inputs=(tokens(2, 11),))


def test_a_model_knows_which_of_its_blocks_were_refused() -> None:
    class Pooling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x.mean(1, keepdim=True)

    model = Decoder(lambda w, h: ByProducts(by_einsum), 3)
    model.blocks[1] = PreNorm(Pooling(), 48)
    routed = modpass.mod_transform(model, 0.5, every=1, example_inputs=(tokens(2, 11),))
    assert [s.name for s in routed.info.skipped] == ["blocks.1"]
    with pytest.raises(BlockError) as caught:
        modpass.mod_transform(Decoder(lambda w, h: Pooling(), 2), 0.5, example_inputs=(tokens(2, 11),))
    assert [s.name for s in caught.value.skipped] == ["blocks.0", "blocks.1"]
    assert "runs along the sequence" in caught.value.skipped[0].reason


@pytest.mark.parametrize(
    ("kind", "fields", "shapes"),
    [
        ("VideoMAEModel", {"image_size": 32, "num_frames": 4}, {"pixel_values": [2, 4, 3, 32, 32]}),
        ("ResNetModel", {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8]}, {"pixel_values": [2, 3, 224, 224]}),
        (
            "WhisperForConditionalGeneration",
            {"num_mel_bins": 8, "max_source_positions": 20, "vocab_size": 97, "pad_token_id": 1},
            {"input_features": [2, 8, 40], "decoder_input_ids": [2, 31]},
        ),
        ("Wav2Vec2Model", {}, {"input_values": [2, 6400]}),
    ],
)
def test_inputs_of_images_video_and_sound_follow_from_the_configuration(
    kind: str, fields: dict[str, Any], shapes: dict[str, list[int]]
) -> None:
    cls = getattr(transformers, kind)
    with torch.device("meta"):
        model = cls(cls.config_class(**fields))
    found = {n: list(v.shape) for n, v in infer_inputs(model).items() if isinstance(v, Tensor)}
    assert {n: found.get(n) for n in shapes} == shapes


def test_the_encoder_of_an_encoder_decoder_gets_no_decoder_ids() -> None:
    config = transformers.UMT5Config(vocab_size=97, d_model=48, d_kv=12, d_ff=80, num_layers=2, num_heads=4)
    assert list(infer_inputs(transformers.UMT5EncoderModel(config))) == ["input_ids", "attention_mask"]
