"""SmolLM2-135M-Instruct from its GGUF file: dequantised tensor by tensor into a Llama of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from modpass.bench.offline import transformers_offline
from modpass.errors import require

__all__ = ["GGUF_FILE", "load_smollm2", "rotate_half_rows"]

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_smollm2(weights: Path, dtype: torch.dtype) -> nn.Module:
    """``transformers.LlamaForCausalLM`` with the dequantised weights of a GGUF file of a Llama.

    Tensors are assigned, not copied, so that the model is held once.

    Raises:
        MissingExtraError: gguf or transformers is not installed.

    Source: the GGUF specification (``docs/gguf.md`` of ggml), section "Standardized key-value pairs".
    """
    gguf = require("gguf", "models")
    transformers = transformers_offline("models")
    reader = gguf.GGUFReader(str(weights))
    config = transformers.LlamaConfig(**_config(reader))
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(config)
    state = {name: tensor.to(dtype) for name, tensor in _tensors(gguf, reader, config)}
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    # Rotary frequencies are not in a state dict, and on the meta device they were never computed.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return _whole(model)


def rotate_half_rows(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of a query or key projection from ggml's rotary pairs (2i, 2i+1) to (i, i + d/2).

    Args:
        weight: [heads * d, width].
        heads: number of heads that the rows belong to.

    Source: ``permute`` of llama.cpp's ``convert_hf_to_gguf.py``, of which this is the inverse.

    >>> rotate_half_rows(np.arange(4, dtype=np.float32)[:, None], heads=1)[:, 0].tolist()
    [0.0, 2.0, 1.0, 3.0]
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _config(reader: Any) -> dict[str, Any]:
    def field(key: str) -> Any:
        return reader.fields[key].contents()

    return {
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(field("llama.rope.freq_base"))},
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "tie_word_embeddings": True,
    }


def _tensors(gguf: Any, reader: Any, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor under the name it has in transformers."""
    rotary = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            name = _TOP[parts[0]]
        else:
            name = f"model.layers.{parts[1]}.{_LAYER[parts[2]]}"
            if parts[2] in rotary:
                weight = rotate_half_rows(weight, rotary[parts[2]])
        # A copy where the reader gave a view of its memory map, which is read-only.
        yield f"{name}.weight", torch.from_numpy(np.require(weight, requirements=["C", "W", "O"]))


def _whole(model: nn.Module) -> nn.Module:
    """The model, unless a tensor of it was never filled."""
    empty = [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor.is_meta]
    if empty:
        raise RuntimeError(f"the GGUF file has no weights for {', '.join(empty)}")
    return model
