"""A tiny random model of any Hugging Face architecture: its own configuration with every size shrunk.

The rules go by what a field's name says it counts (layers, heads, widths, tokens), never by the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import nn

from modpass.bench.coverage_overrides import overrides_for

__all__ = ["enliven", "shrink", "shrunk_value"]

LAYERS, HEADS, HEAD_DIM, WIDTH, HIDDEN, VOCABULARY, POSITIONS = 4, 4, 16, 64, 96, 128, 128

# First match wins; a number is the largest size allowed, so that nothing ever grows.
_RULES: tuple[tuple[str, int], ...] = (
    (r"(num|n)_.*(key_value|kv)_heads|num_kv_heads|multi_query_group_num", 2),
    (r".*(num|n)_.*heads?|n_heads?|num_heads|.*attention_heads|.*_heads", HEADS),
    (r"qk_rope_head_dim|qk_nope_head_dim|rotary_dim|index_head_dim", HEAD_DIM // 2),
    (r".*mamba.*(num|n)_heads|n_mamba_heads|ssm_.*heads", HEADS),
    (r".*head_dim|.*head_size|d_kv|d_head|kv_channels|v_head_dim|.*head_dimension", HEAD_DIM),
    (r".*lora_rank|.*_rank", HEAD_DIM),
    (r".*(num|n)_.*layers|n_layers?|num_layers|.*_layers|.*depth|layers", LAYERS),
    # keys picked by a score of their own: all of them, as scores of zero tie and each runtime breaks ties its own way
    (r"index\w*_topk", POSITIONS),
    # every how many layers one is of another kind, and which is the first
    (r".*layer_period", 2),
    (r".*layer_offset", 1),
    (r".*(experts_per_tok|experts_per_token|top_k|topk|topk_experts|experts_top_k|moe_k)", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r".*_groups", WIDTH),
    (r".*experts?", 4),
    (r".*expert_capacity", 64),
    (r".*(intermediate|ffn|feed_forward|inner|mlp|filter).*(size|dim)|d_ff|d_inner|n_inner|ffn_dim|dim_ff|dff|.*_ffn_dim",
     HIDDEN),
    (r".*vocab.*(size|num)|.*_vocab|.*vocab_size.*|.*vocabulary_size", VOCABULARY),
    (r".*(max_.*position.*|max_.*positions|n_positions|n_ctx|max_seq_len|max_sequence_length|model_max_length)",
     POSITIONS),
    (r".*(sliding_window|attention_window|local_attention|window_len|attention_chunk_size|max_window.*)", 8),
    (r".*(hidden_size.*|hidden_dim|embed_dim|embedding_size|embedding_dim|n_embd|d_model|d_embed|d_latents|proj.*_dim"
     r"|projection_size|width|emb_dim|proj.*size)|dim|word_embed_proj_dim|hidden|bottleneck_size", WIDTH),
)  # fmt: skip
_LAYER_FIELDS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
_STAGES = ("depths", "num_block_repeats", "layer_repeats", "decoder_depths")
# A list here means one width per stage: the first stage's width then stays.
_PER_STAGE = ("num_heads", "num_attention_heads", "hidden_sizes", "out_channels")
# A layer with a loop over tokens, which the trace unrolls step by step.
_SLOW = {"linear_attention"}
# Fields that default to None although the model cannot do without.
_NEEDED = {"head_dim": HEAD_DIM, "num_experts_per_tok": 2, "n_routed_experts": 4, "num_key_value_heads": HEADS}
# Numbers of layers, counted from the first.
_LAYER_NUMBERS = re.compile(r".*layers?_(indices|indexes|ids)|.*hook_ids")
_TOKEN_ID = re.compile(r".*(token_id|token_index|token_idx|_id|index)$")


def shrunk_value(name: str, value: Any) -> Any:
    """The value of a field, shrunk by what its name says it counts; anything else is returned as it is.

    >>> shrunk_value("num_hidden_layers", 32), shrunk_value("hidden_size", 4096)
    (4, 64)
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return value
    for pattern, limit in _RULES:
        if re.fullmatch(pattern, name):
            return min(value, limit)
    if _TOKEN_ID.fullmatch(name) and value >= VOCABULARY:
        return 1 if name.startswith(("bos", "eos", "decoder_start")) else 0
    return value


def shrink(cls: Any, **given: Any) -> Any:
    """A configuration of class ``cls`` with small sizes; sub-configurations too. ``given`` overrides.

    Raises:
        Exception: whatever the class itself raises when its sizes do not fit each other.

    >>> from transformers import LlamaConfig
    >>> shrink(LlamaConfig).num_hidden_layers
    4
    """
    defaults = dict(_defaults(cls))
    values = {name: shrunk_value(name, value) for name, value in defaults.items()}
    small = {name: value for name, value in values.items() if value != defaults[name]}
    small |= {name: value for name, value in _NEEDED.items() if name in defaults and defaults[name] is None}
    small |= {
        n: _depths(value, "window_size" in defaults)
        for n, value in defaults.items()
        if n in _STAGES and _numbers(value)
    }
    if any(
        isinstance(defaults.get(n), list | tuple)
        for n in ("num_heads", "num_attention_heads", "hidden_sizes", "out_channels")
    ):
        small = {n: v for n, v in small.items() if n not in ("embed_dim", "hidden_dim", "hidden_size")}
    plain = _plain(cls)
    small |= _layers(plain, defaults, values) | _grouped_heads(defaults, small)
    small |= _image(defaults) | _rotary(defaults) | _layer_numbers(plain, defaults)
    small |= dict(_sub_configs(cls, plain))
    return cls(**(small | overrides_for(cls.model_type) | overrides_for(cls.__name__) | given))


def _defaults(cls: Any) -> Iterator[tuple[str, Any]]:
    """Each field's own default, before the class derives further fields from it."""
    for field in fields(cls):
        if field.init and not field.name.startswith("_"):
            made = None if field.default_factory is MISSING else field.default_factory()
            yield field.name, made if field.default is MISSING else field.default


def _sub_configs(cls: Any, plain: Any) -> Iterator[tuple[str, Any]]:
    """Each part of a composite configuration, shrunk, with what the whole asks of it."""
    specs = getattr(cls, "sub_configs_defaults", None) or {}
    for name in {**(getattr(cls, "sub_configs", None) or {}), **specs}:
        part = _part(plain, name, getattr(specs.get(name), "model_type", None))
        if hasattr(part, "model_type"):
            asked = getattr(specs.get(name), "init_kwargs", None) or {}
            small = {k: shrunk_value(k, v) for k, v in asked.items() if k != "image_size"}
            yield name, shrink(type(part), **(small | overrides_for(f"{cls.model_type}.{name}")))


def _part(plain: Any, name: str, fallback: str | None) -> Any:
    """A part as its defaults have it; as the whole declares it, where there are none or they are another package's."""
    part = getattr(plain, name, None)
    if fallback is None or (plain is not None and getattr(part, "model_type", None) != "timm_backbone"):
        return part
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[fallback]()


def _plain(cls: Any) -> Any:
    try:
        return cls()
    except Exception:  # a class whose own defaults do not fit each other
        return None


def _layers(plain: Any, defaults: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Lists with an entry per layer keep as many entries as layers are left, one of each kind at least."""
    name = next((n for n in _LAYER_FIELDS if isinstance(defaults.get(n), int)), None)
    if name is None or defaults[name] <= small[name]:
        return {}
    derived = {} if plain is None else vars(plain)
    lists = {
        n: v for n, v in derived.items() if n in defaults and isinstance(v, list | tuple) and len(v) == defaults[name]
    }
    if not lists:
        return {}
    kinds = list(zip(*lists.values(), strict=True))
    firsts = sorted({kinds.index(kind): None for kind in dict.fromkeys(kinds)}) if all(map(_hashable, kinds)) else []
    # the others: of a kind that is not slow, if there are
    others = sorted(
        (i for i in range(defaults[name]) if i not in firsts), key=lambda i: any(s in kinds[i] for s in _SLOW)
    )
    kept = sorted(firsts[: small[name]] + others[: small[name] - len(firsts)])
    return {n: [v[i] for i in kept] for n, v in lists.items()}


def _layer_numbers(plain: Any, defaults: Mapping[str, Any]) -> dict[str, list[int]]:
    """Layers that are told by number are among those that are left."""
    named: dict[str, Any] = {n: getattr(plain, n, None) for n in defaults if _LAYER_NUMBERS.fullmatch(n)}
    return {n: [min(v, LAYERS - 1) for v in value] for n, value in named.items() if _numbers(value)}


def _hashable(kind: tuple[Any, ...]) -> bool:
    return all(k is None or isinstance(k, str | int | float) for k in kind)


def _numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(v, int) for v in value)


def _depths(value: Sequence[int], windows: bool) -> list[int]:
    """Two layers a stage; one stage where each has windows, whose sizes take the trace minutes to work out."""
    return [min(d, 2) for d in value][: 1 if windows else None]


def _grouped_heads(defaults: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, int]:
    """As many key heads as query heads stay as many."""
    names = ("num_attention_heads", "n_head", "num_heads")
    heads = next((n for n in names if isinstance(defaults.get(n), int)), None)
    keys = [n for n in ("num_key_value_heads", "num_kv_heads") if isinstance(defaults.get(n), int)]
    return {n: small.get(heads, defaults[heads]) for n in keys if heads and defaults[n] == defaults[heads]}


def _image(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Four patches a side, or 64 pixels where patches are small or none."""
    size, patch = defaults.get("image_size"), defaults.get("patch_size")
    if size is None or "window_size" in defaults:  # windows must tile the image at every stage
        return {}
    first = patch[0] if isinstance(patch, list | tuple) else patch
    pixels = 4 * first if isinstance(first, int) and first >= 8 else 64
    return {"image_size": type(size)([pixels] * len(size)) if isinstance(size, list | tuple) else pixels}


def _rotary(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary sections (time, height, width) add up to half a head."""
    rope = defaults.get("rope_parameters") or defaults.get("rope_scaling")
    if not isinstance(rope, Mapping) or "mrope_section" not in rope:
        return {}
    name = "rope_parameters" if defaults.get("rope_parameters") else "rope_scaling"
    return {name: {**rope, "mrope_section": [2, 3, 3]}}


def enliven(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw every weight matrix anew, large enough that each token and each block matters to the output.

    >>> float(enliven(nn.Linear(64, 64)).weight.detach().std()) > 0.1
    True
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            if parameter.dim() > 1:
                std = 1 / math.sqrt(parameter[0].numel())
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            elif float(parameter.abs().max()) <= 1e-3:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for module in model.modules():  # many in a row would fade what they scale
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.weight is not None:
                module.weight.fill_(1.0)
    return model
