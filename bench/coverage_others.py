"""Models of other makers: PyTorch's own, traced graphs, and packages that may or may not be installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from modpass.errors import require

__all__ = ["OTHERS", "Other"]

_WIDTH, _HEADS, _LAYERS, _VOCABULARY = 64, 4, 4, 128
# A model, its example inputs, and the module that it was made from where that is another.
_Made = tuple[nn.Module, dict[str, Any], nn.Module | None]


@dataclass(frozen=True)
class Other:
    """How to make a model: its class name, and a function that returns it with its example inputs."""

    kind: str
    make: Callable[[], _Made]


def _stream(batch_first: bool, tokens: int = 37) -> Tensor:
    return torch.randn(2, tokens, _WIDTH) if batch_first else torch.randn(tokens, 2, _WIDTH)


def _encoder(batch_first: bool) -> _Made:
    layer = nn.TransformerEncoderLayer(_WIDTH, _HEADS, 96, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
    return model, {"src": _stream(batch_first)}, None


def _decoder(batch_first: bool) -> _Made:
    layer = nn.TransformerDecoderLayer(_WIDTH, _HEADS, 96, batch_first=batch_first)
    inputs = {"tgt": _stream(batch_first), "memory": _stream(batch_first, 31)}
    return nn.TransformerDecoder(layer, _LAYERS), inputs, None


def _transformer() -> _Made:
    model = nn.Transformer(_WIDTH, _HEADS, _LAYERS, _LAYERS, 96, batch_first=True)
    return model, {"src": _stream(True, 31), "tgt": _stream(True)}, None


def _symbolic() -> _Made:
    """A graph of torch.fx.symbolic_trace, which has module calls in place of ATen ops."""
    model = _Plain()
    return fx.symbolic_trace(model), {"x": _stream(True)}, model


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        layers = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 96), nn.GELU(), nn.Linear(96, _WIDTH)
        self.mlp = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """The stream ``[B, S, D]`` after attention and a feed-forward net."""
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        x = x + self.out(y.transpose(1, 2).flatten(2))
        changed: Tensor = x + self.mlp(x)
        return changed


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(_LAYERS))
        self.norm = nn.LayerNorm(_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The stream ``[B, S, D]`` after all blocks."""
        for block in self.blocks:
            x = block(x)
        normed: Tensor = self.norm(x)
        return normed


def _x_transformers(part: str) -> _Made:
    x = require("x_transformers", "coverage")
    layers = getattr(x, part)(dim=_WIDTH, depth=_LAYERS, heads=_HEADS, attn_dim_head=16)
    model = x.TransformerWrapper(num_tokens=_VOCABULARY, max_seq_len=_VOCABULARY, attn_layers=layers)
    return model, {"x": torch.randint(0, _VOCABULARY, (2, 37))}, None


def _timm(name: str) -> _Made:
    timm = require("timm", "coverage")
    return timm.create_model(name, pretrained=False, img_size=112), {"x": torch.randn(2, 3, 112, 112)}, None


def _torchvision(name: str) -> _Made:
    models = importlib.import_module(require("torchvision", "coverage").__name__ + ".models")
    return models.get_model(name, weights=None, image_size=64), {"x": torch.randn(2, 3, 64, 64)}, None


OTHERS: dict[str, Other] = {
    "torch-encoder": Other("TransformerEncoder", lambda: _encoder(True)),
    "torch-encoder-sbd": Other("TransformerEncoder", lambda: _encoder(False)),
    "torch-decoder": Other("TransformerDecoder", lambda: _decoder(True)),
    "torch-decoder-sbd": Other("TransformerDecoder", lambda: _decoder(False)),
    "torch-transformer": Other("Transformer", _transformer),
    "symbolic-trace": Other("GraphModule", _symbolic),
    "x-transformers-decoder": Other("TransformerWrapper", lambda: _x_transformers("Decoder")),
    "x-transformers-encoder": Other("TransformerWrapper", lambda: _x_transformers("Encoder")),
    **{
        f"timm-{n}": Other("VisionTransformer", lambda n=n: _timm(n))  # type: ignore[misc]
        for n in (
            "vit_tiny_patch16_224",
            "deit_tiny_patch16_224",
            "vit_small_patch14_reg4_dinov2",
            "eva02_tiny_patch14_224",
        )
    },
    "torchvision-vit": Other("VisionTransformer", lambda: _torchvision("vit_b_16")),
}
