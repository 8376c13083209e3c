"""A small offline zoo: models that make their positions and masks in every way that users' models do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

SIZES = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 80}


class InnerRotaryAttention(nn.Module):
    """Makes its rotary positions itself, from arange(sequence)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, S, D = x.shape
        q, k, v = self.qkv(x).view(B, S, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        half = D // self.heads // 2
        angle = torch.arange(S)[:, None] * 100.0 ** (-torch.arange(half) / half)
        cos, sin = angle.cos(), angle.sin()

        def turn(t: Tensor) -> Tensor:
            a, b = t[..., :half], t[..., half:]
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, S, D))


class TrilAttention(nn.Module):
    """Slices a lower-triangular buffer and does softmax by hand, as GPT lessons do."""

    def __init__(self, width: int, heads: int, limit: int = 64) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("tril", torch.ones(limit, limit).tril())

    def forward(self, x: Tensor) -> Tensor:
        B, S, D = x.shape
        q, k, v = (t.view(B, S, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(D, -1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(D // self.heads)
        scores = scores.masked_fill(self.tril[:S, :S] == 0, float("-inf"))
        y = self.drop(scores.softmax(-1)) @ v
        return self.out(y.transpose(1, 2).contiguous().view(B, S, D))


class AlibiAttention(nn.Module):
    """A relative bias per head, made inside the block, batch and heads merged into one dim."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, S, D = x.shape
        H = self.heads
        q, k, v = (t.reshape(B, S, H, -1).transpose(1, 2).reshape(B * H, S, -1) for t in self.qkv(x).split(D, -1))
        place = torch.arange(S, device=x.device)
        bias = -(place[:, None] - place[None]).abs() * (torch.arange(H) + 1.0).view(H, 1, 1) * 0.1
        bias = bias.masked_fill(place[None, None] > place[None, :, None], float("-inf"))
        scores = torch.baddbmm(bias.repeat(B, 1, 1), q, k.transpose(1, 2), alpha=(D // H) ** -0.5)
        y = torch.softmax(scores, -1) @ v
        return self.out(y.view(B, H, S, -1).transpose(1, 2).reshape(B, S, D))


class PreNorm(nn.Module):
    def __init__(self, attention: nn.Module, width: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), attention, nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(
        self,
        attention: Callable[[int, int], nn.Module],
        layers: int = 4,
        width: int = 48,
        heads: int = 4,
        vocabulary: int = 97,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(PreNorm(attention(width, heads), width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def encoder(batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(48, 4, 80, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    for p in model.parameters():  # the layers start as copies of one another
        nn.init.normal_(p, std=0.2)
    return model


def tokens(B: int, S: int) -> Tensor:
    return torch.randint(2, 97, (B, S))


def masked(B: int, S: int, side: str) -> dict[str, Tensor]:
    """Rows of different length, padded on one side."""
    mask = torch.ones(B, S, dtype=torch.int64)
    for b in range(1, B):
        pad = min(S - 1, b * S // (B + 1))
        if pad:
            mask[b, :pad] = 0 if side == "left" else mask[b, :pad]
            mask[b, S - pad :] = 0 if side == "right" else mask[b, S - pad :]
    return {"input_ids": tokens(B, S), "attention_mask": mask}


@dataclass(frozen=True)
class Entry:
    """A model of the zoo: how to make it, inputs for (batch, sequence, padding side), and its padding input."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int, str], dict[str, Any]]
    examples: bool = True
    padding_mask: str = "attention_mask"

    def example_inputs(self) -> dict[str, Any] | None:
        return self.inputs(2, 23, "none") if self.examples else None


def _padded_encoder(B: int, S: int, side: str) -> dict[str, Any]:
    keep = masked(B, S, side)["attention_mask"]
    return {"src": torch.randn(S, B, 48), "src_key_padding_mask": keep == 0}


ZOO: dict[str, Entry] = {
    "llama": Entry(
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=97, num_key_value_heads=2, tie_word_embeddings=True, **SIZES)
        ),
        masked,
        examples=False,
    ),
    "bert": Entry(
        lambda: transformers.BertModel(transformers.BertConfig(vocab_size=97, max_position_embeddings=64, **SIZES)),
        masked,
        examples=False,
    ),
    "gpt2": Entry(
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=97, n_embd=48, n_layer=4, n_head=4, n_positions=64)
        ),
        masked,
        examples=False,
    ),
    "mixtral": Entry(
        lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(vocab_size=97, num_key_value_heads=2, num_local_experts=4, **SIZES)
        ),
        masked,
        examples=False,
    ),
    "albert": Entry(
        lambda: transformers.AlbertModel(
            transformers.AlbertConfig(vocab_size=97, embedding_size=32, max_position_embeddings=64, **SIZES)
        ),
        masked,
        examples=False,
    ),
    "dinov2": Entry(
        lambda: transformers.Dinov2Model(
            transformers.Dinov2Config(
                hidden_size=48, num_hidden_layers=4, num_attention_heads=4, image_size=56, mlp_ratio=2
            )
        ),
        lambda B, S, side: {"pixel_values": torch.randn(B, 3, 56, 56)},
        examples=False,
    ),
    "inner-rotary": Entry(lambda: Decoder(InnerRotaryAttention), lambda B, S, side: {"ids": tokens(B, S)}),
    "tril-buffer": Entry(lambda: Decoder(TrilAttention), lambda B, S, side: {"ids": tokens(B, S)}),
    "alibi": Entry(lambda: Decoder(AlibiAttention), lambda B, S, side: {"ids": tokens(B, S)}),
    "encoder": Entry(lambda: encoder(True), lambda B, S, side: {"src": torch.randn(B, S, 48)}),
    "encoder-sbd": Entry(lambda: encoder(False), _padded_encoder, padding_mask="~src_key_padding_mask"),
}


def make(name: str) -> nn.Module:
    """A model of the zoo in eval mode, weights drawn from a fixed seed, large enough that every token matters."""
    torch.manual_seed(0)
    model = ZOO[name].make().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(3.0)
    return model


def first(output: Any) -> Tensor:
    """The main tensor of an output."""
    return output if isinstance(output, Tensor) else next(iter(output.values()))
