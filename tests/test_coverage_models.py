"""What the coverage run measures: shrunk configurations, small models, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from modpass.bench.coverage_configs import enliven, shrink, shrunk_value
from modpass.bench.coverage_inputs import inputs_for
from modpass.bench.coverage_models import FAMILIES, make_model, model_names
from modpass.errors import InputError

Report = Callable[[str, Any], None]


@pytest.mark.parametrize(
    ("config", "field", "expected"),
    [
        (transformers.LlamaConfig, "num_hidden_layers", 4),
        (transformers.GPT2Config, "n_embd", 64),
        (transformers.MistralConfig, "num_key_value_heads", 2),
        (transformers.BertConfig, "vocab_size", 128),
        (transformers.MixtralConfig, "num_local_experts", 4),
        (transformers.ViTConfig, "image_size", 64),
        (transformers.T5Config, "num_decoder_layers", 4),
    ],
)
def test_a_configuration_shrinks_by_what_its_fields_count(config: Any, field: str, expected: int) -> None:
    assert getattr(shrink(config), field) == expected


def test_no_size_grows() -> None:
    assert shrunk_value("num_hidden_layers", 2) == 2
    assert shrunk_value("type_vocab_size", 2) == 2


def test_special_tokens_stay_inside_the_shrunk_vocabulary() -> None:
    config = shrink(transformers.Qwen2VLConfig)
    assert config.image_token_id < config.text_config.vocab_size


def test_a_layer_of_each_kind_is_kept() -> None:
    config = shrink(transformers.Gemma3TextConfig)
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert len(config.layer_types) == config.num_hidden_layers == 4


def test_key_heads_stay_as_many_as_query_heads_where_they_were() -> None:
    config = shrink(transformers.LlamaConfig)
    assert config.num_key_value_heads == config.num_attention_heads


def test_slow_layers_are_kept_once_and_layers_told_by_number_are_there() -> None:
    config = shrink(transformers.Qwen3NextConfig)
    assert list(config.layer_types) == ["linear_attention", *["full_attention"] * 3]
    assert max(shrink(transformers.models.mllama.MllamaVisionConfig).intermediate_layers_indices) == 3


def test_a_backbone_of_another_package_gives_way_to_transformers_own() -> None:
    config = shrink(transformers.DetrConfig)
    assert (config.backbone_config.model_type, config.backbone_config.out_features) == ("resnet", ["stage4"])


def test_parts_of_a_configuration_whose_own_defaults_do_not_fit_are_shrunk_too() -> None:
    assert shrink(transformers.models.gemma4_assistant.Gemma4AssistantConfig).text_config.hidden_size == 64


def test_enlivened_weights_repeat_and_leave_no_block_without_effect() -> None:
    a, b = enliven(nn.Linear(8, 8)), enliven(nn.Linear(8, 8))
    assert torch.equal(a.weight, b.weight)  # type: ignore[arg-type]
    scale = nn.Module()
    scale.gamma = nn.Parameter(torch.full((8,), 1e-5))
    enliven(scale)
    assert scale.gamma.abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_models_under_unique_names(family: str) -> None:
    names = model_names(family)
    assert names
    assert all(isinstance(kind, str) and kind for kind in names.values())


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(InputError, match="there is no family 'fish'; there are: causal-lm, encoder, image"):
        model_names("fish")


def test_a_model_is_the_same_each_time() -> None:
    one, two = (make_model("encoder", "bert").model.state_dict() for _ in range(2))
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_inputs_that_the_configuration_does_not_tell_are_found_by_trying_layouts() -> None:
    assert inputs_for(make_model("encoder-decoder", "whisper").model) is None
    named = inputs_for(make_model("image", "siglip2").model)
    assert named is not None
    assert set(named) == {"pixel_values", "spatial_shapes", "pixel_attention_mask"}


@pytest.mark.parametrize(
    ("family", "name", "shapes"),
    [
        ("image", "vit_mae", {"pixel_values": (2, 3, 64, 64), "noise": (2, 16)}),
        ("encoder-decoder", "voxtral_realtime", {"input_features": (2, 128, 64), "input_ids": (2, 8)}),
        ("encoder-decoder", "kyutai_speech_to_text", {"input_ids": (2, 37, 33)}),
    ],
)
def test_noise_sound_beside_text_and_codebooks_are_fed(family: str, name: str, shapes: dict[str, Any]) -> None:
    named = inputs_for(make_model(family, name).model)
    assert named is not None
    assert {n: tuple(v.shape) for n, v in named.items()} == shapes
