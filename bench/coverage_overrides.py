"""What an architecture demands of its own sizes, where the names of its fields do not say it."""

from __future__ import annotations

from typing import Any

__all__ = ["overrides_for"]

_OVERRIDES: dict[str, dict[str, Any]] = {
    # state-space heads: heads * head width = expand * hidden width
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1},
    # which layers attend is said by number
    "bamba": {"attn_layer_indices": [1, 3]},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1},
    # one local layer, then one global
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    # the last layers share keys with an earlier one of their kind
    "gemma3n_text": {"num_kv_shared_layers": 1},
    "gemma4_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "dots1": {"n_shared_experts": 1},
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 128,
        "split_ngram_parts": 1,
    },
    # the shared block must be used twice
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    # its encoder alone
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
    "reformer": {"axial_pos_embds": False},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "shieldgemma2": {"yes_token_index": 3, "no_token_index": 4},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    # the reference must tell the tokens from the width of a head
    "videoprism_vision_model": {"num_frames": 8},
    "levit": {"key_dim": [8, 8, 8], "attention_ratio": [3, 3, 3]},  # 16 tokens in its last stage
    # read by its own code, declared by no field
    "DbrxAttentionConfig": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
    "MoonshineStreamingConfig": {"num_key_value_heads": 4},
    # its parts are backbones and adaptors with sizes of each other
    "depth_pro": {"patch_size": 56},  # a patch is the image of each part
    "fun_asr_nano.adaptor_config": {"intermediate_size": 16},
    "fun_asr_nano_encoder": {"num_timestamp_prediction_layers": 2},
    # the pixel shuffle puts four patches side by side
    "llama4_vision_model": {"intermediate_size": 256},
    # a drafting model: keys come from another model, for every layer
    "gemma4_assistant.text_config": {
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": 4,
    },
    # which of timm's, it does not say
    "timm_backbone": {"backbone": "vit_tiny_patch16_224"},
    "timm_wrapper": {"architecture": "vit_tiny_patch16_224"},
    # one language must be the default
    "xmod": {"default_language": "en_XX"},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
}


def overrides_for(name: str) -> dict[str, Any]:
    """The fields to set for a model type, or for one of its model or configuration classes; empty for nearly all.

    >>> overrides_for("llama")
    {}
    """
    return dict(_OVERRIDES.get(name, {}))
