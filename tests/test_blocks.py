"""What is found, what is refused, and the reasons."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn

import modpass
from modpass.errors import BlockError, InputError, TraceError
from tests.test_transform import routed_pair, transform
from tests.zoo import ZOO, Decoder, InnerRotaryAttention, PreNorm, make, tokens


class Mixer(nn.Module):
    """Stands where attention would, and looks along the sequence in another way."""

    def __init__(self, mix: Callable[[Tensor], Tensor], width: int = 48) -> None:
        super().__init__()
        self.mix, self.out = mix, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(x))


class Convolution(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Scan(nn.Module):
    """A gated linear recurrence by cumulative sums, as state-space models have."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.decay, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        decay = torch.sigmoid(self.decay(x)).log().cumsum(1)
        return (self.value(x) * (-decay).exp()).cumsum(1) * decay.exp()


MIXERS: dict[str, tuple[Callable[[int, int], nn.Module], str]] = {
    "convolution": (Convolution, r"conv1d.* convolves over tokens \(kernel \(3,\)\)"),
    "scan": (Scan, r"cumsum.* runs along the sequence"),
    "pooling": (lambda w, h: Mixer(lambda x: x + x.mean(1, keepdim=True)), r"mean.* runs along the sequence"),
    "shift": (lambda w, h: Mixer(lambda x: torch.cat([x[:, :1], x[:, :-1]], 1)), r"takes the sequence apart"),
    "roll": (lambda w, h: Mixer(lambda x: x.roll(1, 1)), "roll"),
    "first token": (lambda w, h: Mixer(lambda x: x - x[:, :1]), r"slice.* takes the sequence apart"),
    "linear attention": (
        lambda w, h: Mixer(lambda x: x @ (x.transpose(1, 2) @ x)),
        r"sums over tokens outside attention",
    ),
    "flip": (lambda w, h: Mixer(lambda x: x.flip(1)), r"flip.* runs along the sequence"),
    "sort": (lambda w, h: Mixer(lambda x: x.sort(1).values), "sort"),
    "token shift": (lambda w, h: Mixer(lambda x: nn.functional.pad(x, (0, 0, 1, -1))), "shifts the sequence"),
    "reshape": (lambda w, h: Mixer(lambda x: x.reshape(x.shape[0], 48, -1).transpose(1, 2)), "takes tokens apart"),
    "tiling": (lambda w, h: Mixer(lambda x: x.repeat(1, 2, 1)[:, : x.shape[1]]), "repeats the sequence"),
    "batch mean": (lambda w, h: Mixer(lambda x: x - x.mean(0, keepdim=True)), r"mean.* runs along the batch"),
    "hard attention": (
        lambda w, h: Mixer(lambda x: (x @ x.transpose(1, 2)).argmax(-1, keepdim=True).float() + x),
        r"argmax.* runs along the sequence",
    ),
    "softmax over queries": (
        lambda w, h: Mixer(lambda x: (x @ x.transpose(1, 2)).softmax(-2) @ x),
        r"softmax.* runs along the sequence",
    ),
    "max pool": (lambda w, h: Mixer(lambda x: x.amax(1, keepdim=True) + x), "amax"),
}


@pytest.mark.parametrize("kind", MIXERS)
def test_mixing_outside_attention_is_refused_with_operator_and_block(kind: str) -> None:
    mixer, reason = MIXERS[kind]
    model = Decoder(mixer)
    blocks = modpass.find_blocks(model, (tokens(2, 11),))
    assert len(blocks) == 0
    assert [s.name for s in blocks.skipped] == [f"blocks.{i}" for i in range(4)]
    with pytest.raises(BlockError, match=reason):
        modpass.mod_transform(model, 0.5, example_inputs=(tokens(2, 11),))


def test_a_stack_with_some_mixing_blocks_routes_the_others() -> None:
    model = Decoder(InnerRotaryAttention)
    model.blocks[1] = PreNorm(Convolution(48, 4), 48)
    blocks = modpass.find_blocks(model, (tokens(2, 11),))
    assert blocks.names() == ["blocks.0", "blocks.2", "blocks.3"]
    with pytest.raises(BlockError, match=r"block 'blocks\.1' cannot be routed: .*convolves over tokens"):
        modpass.mod_transform(model, 0.5, blocks=["blocks.1"], example_inputs=(tokens(2, 11),))


@pytest.mark.parametrize(
    ("name", "stack"),
    [
        ("llama", "model.layers"),
        ("bert", "encoder.layer"),
        ("gpt2", "transformer.h"),
        ("dinov2", "encoder.layer"),
        ("encoder", "layers"),
        ("alibi", "blocks"),
    ],
)
def test_blocks_of_every_zoo_model_are_found_by_their_paths(name: str, stack: str) -> None:
    blocks = modpass.find_blocks(make(name), ZOO[name].example_inputs())
    assert blocks.names() == [f"{stack}.{i}" for i in range(4)]
    assert blocks.skipped == ()


def test_the_table_names_blocks_streams_and_side_inputs() -> None:
    table = str(modpass.find_blocks(make("llama")))
    assert "model.layers.0  LlamaDecoderLayer  [B, S, 48]" in table
    assert "dims 2, 3 at the chosen tokens" in table
    refused = str(modpass.find_blocks(Decoder(Convolution), (tokens(2, 11),)))
    assert "refused" in refused
    assert "convolves over tokens" in refused


def test_a_vision_transformer_with_dropout_is_reopened_too() -> None:
    config = transformers.ViTConfig(
        hidden_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=80,
        image_size=32,
        patch_size=8,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    routed = modpass.mod_transform(transformers.ViTModel(config).eval(), 0.5)
    assert [n.rpartition(".")[2] for n in routed.routed_blocks] == ["1", "3"]
    with torch.no_grad():
        routed.train()
        x = torch.randn(2, 3, 32, 32)
        assert not torch.equal(routed(x).last_hidden_state, routed(x).last_hidden_state)


class ManyFeedForwards(nn.Module):
    """A layer whose feed-forward parts repeat and are residual themselves, beside one attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = InnerRotaryAttention(48, 4)
        self.parts = nn.ModuleList(FeedForward() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        for part in self.parts:
            x = part(x)
        return x


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x).relu()


def test_a_layer_with_attention_is_the_block_not_its_repeated_feed_forwards() -> None:
    model = nn.Sequential(*(ManyFeedForwards() for _ in range(3)))
    assert modpass.find_blocks(model, (torch.randn(2, 9, 48),)).names() == ["0", "1", "2"]


class AddsTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(48))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y * self.scale


def test_a_repeated_sum_without_a_product_is_no_block() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sums = nn.ModuleList(AddsTables() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.sums:
                x = part(x, x.sin())
            return x

    assert len(modpass.find_blocks(Sums(), (torch.randn(2, 9, 48),))) == 0


def test_finding_changes_nothing() -> None:
    model = make("tril-buffer").train()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    modpass.find_blocks(model, (tokens(2, 11),))
    assert model.training
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_wrong_block_names_and_settings_are_refused_in_words() -> None:
    model = make("llama")
    with pytest.raises(BlockError, match=r"there is no block 'model\.layers\.9'; there are: model\.layers\.0"):
        transform("llama", model, 0.5, blocks=["model.layers.9"])
    with pytest.raises(BlockError, match=r"no block is left to route \(every=9\)"):
        transform("llama", model, 0.5, every=9)
    with pytest.raises(BlockError, match="capacity has no entry for the routed block"):
        transform("llama", model, {"model.layers.1": 0.5})
    with pytest.raises(InputError, match="gate is 'soft'; it must be one of 'linear', 'sigmoid', 'unit'"):
        transform("llama", model, 0.5, gate="soft")
    with pytest.raises(InputError, match="every is 0; it must be a whole number of 1 or more"):
        transform("llama", model, 0.5, every=0)
    with pytest.raises(InputError, match="padding_mask 'nope' is no traced input; there are: input_ids"):
        modpass.mod_transform(model, 0.5, padding_mask="nope")


def test_a_model_that_does_not_say_what_it_takes_is_asked_for_example_inputs() -> None:
    with pytest.raises(InputError, match="Decoder does not say what it takes; pass example_inputs"):
        modpass.mod_transform(Decoder(InnerRotaryAttention))
    with pytest.raises(InputError, match=r"example_inputs do not fit Decoder\.forward"):
        modpass.mod_transform(Decoder(InnerRotaryAttention), example_inputs={"idx": tokens(2, 9)})


def test_a_model_without_blocks_and_one_that_cannot_be_traced_are_refused() -> None:
    with pytest.raises(BlockError, match="no block was found"):
        modpass.mod_transform(nn.Linear(4, 4), example_inputs=(torch.randn(2, 3, 4),))

    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(TraceError, match=r"Branches cannot be traced by torch\.export"):
        modpass.mod_transform(Branches(), example_inputs=(torch.randn(2, 3, 4),))
    with pytest.raises(InputError, match="a str cannot be transformed"):
        modpass.mod_transform("model")  # type: ignore[arg-type]


def test_inputs_that_were_not_traced_are_refused_in_words() -> None:
    _, routed = routed_pair("llama")
    with pytest.raises(InputError, match="input 'labels' was not traced; the graph takes: input_ids, attention_mask"):
        routed(input_ids=tokens(2, 9), labels=tokens(2, 9))
    with pytest.raises(InputError, match="input 'input_ids' is missing"):
        routed(attention_mask=tokens(2, 9))
    with pytest.raises(InputError, match="input 'use_cache' was traced as the constant False"):
        routed(input_ids=tokens(2, 9), use_cache=True)


def test_two_inputs_that_could_be_the_stream_are_refused() -> None:
    class Injected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = PreNorm(InnerRotaryAttention(48, 4), 48)

        def forward(self, x: Tensor, e: Tensor) -> Tensor:
            return self.inner(e + x)

    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.inject = nn.ModuleList(Injected() for _ in range(2)), nn.Linear(48, 48)

        def forward(self, x: Tensor) -> Tensor:
            e = self.inject(x)
            for block in self.blocks:
                x = block(x, e)
            return x

    blocks = modpass.find_blocks(Looped(), (torch.randn(2, 9, 48),))
    assert any("several inputs could be the residual stream" in s.reason for s in blocks.skipped)


def test_a_floating_padding_mask_and_a_foreign_size_are_refused_in_words() -> None:
    class Masked(Decoder):
        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            return super().forward(ids) * (attention_mask.sum() * 0 + 1)

    model = Masked(InnerRotaryAttention)
    with pytest.raises(InputError, match="which may be additive"):
        modpass.mod_transform(model, 0.5, example_inputs=(tokens(2, 9), torch.zeros(2, 9)))
    _, routed = routed_pair("dinov2")
    with pytest.raises(InputError, match="input 'pixel_values' has shape"):
        routed(torch.randn(2, 4, 56, 56))
    with pytest.raises(InputError, match="input 'input_ids' has 1 dims; it was traced with 2"):
        routed_pair("llama")[1](tokens(1, 9)[0])


def test_a_mask_that_the_model_does_not_read_still_keeps_padding_out() -> None:
    class Unused(Decoder):
        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            return super().forward(ids)

    routed = modpass.mod_transform(Unused(InnerRotaryAttention), 0.5, example_inputs=(tokens(2, 9), tokens(2, 9)))
    mask = torch.ones(1, 12, dtype=torch.int64)
    mask[0, 6:] = 0
    with torch.no_grad(), modpass.recorded_choices() as choices:
        routed(tokens(1, 12), mask)
    assert all(c.tolist() == [list(range(6))] for c in choices.values())


def test_a_branch_on_a_size_holds_only_where_it_was_traced() -> None:
    class Branch(Decoder):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * (2 if ids.shape[1] > 8 else 1)

    routed = modpass.mod_transform(Branch(InnerRotaryAttention), 0.5, example_inputs=(tokens(2, 11),))
    with pytest.raises(InputError, match="input 'ids' has sequence 6; the trace holds for 9 or more"):
        routed(tokens(2, 6))
