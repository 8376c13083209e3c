"""Example inputs for a model that does not say what it takes: the usual layouts, tried until one runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from modpass.errors import InputError
from modpass.inputs import as_named

__all__ = ["inputs_for"]

_ROWS, _PATCHES, _TARGET, _FRAMES, _SAMPLES = 2, 16, 31, 64, 6400


def inputs_for(model: nn.Module) -> dict[str, Any] | None:
    """Inputs on which ``model`` runs; None where modpass finds such inputs by itself.

    Raises:
        InputError: no layout fits a model without a configuration.
        Exception: no layout fits; the model's own error on the first that it could be given.

    >>> inputs_for(nn.Linear(3, 3))
    Traceback (most recent call last):
    modpass.errors.InputError: no usual layout of inputs fits Linear.forward(input)
    """
    first: Exception | None = None
    known = [] if "noise" in inspect.signature(model.forward).parameters else [None]
    for named in [*known, *_layouts(model)]:
        try:
            _run(model, as_named(model, named))
            return named
        except Exception as e:  # models raise every kind of error on inputs they do not take
            first = e if first is None or isinstance(first, InputError | AttributeError) else first
    assert first is not None
    if not hasattr(model, "config"):
        taken = ", ".join(inspect.signature(model.forward).parameters)
        raise InputError(f"no usual layout of inputs fits {type(model).__name__}.forward({taken})") from first
    raise first


def _run(model: nn.Module, named: dict[str, Any]) -> None:
    with torch.no_grad():
        model(**named)


def _layouts(model: nn.Module) -> Iterator[dict[str, Any]]:
    """What the forward's own parameter names ask for, in the layouts that are usual for each."""
    takes = inspect.signature(model.forward).parameters
    for main, layouts in _MAIN.items():
        if main in takes:
            for tensor in layouts(model):
                beside = _beside(model, tensor, takes)
                yield {main: tensor, **beside}
                if main != "input_ids" and "input_ids" in takes:
                    yield {main: tensor, "input_ids": _aligned_ids(model, tensor), **beside}


def _images(model: nn.Module) -> Iterator[Tensor]:
    config = _part(model, "vision_config")
    size: Any = getattr(config, "image_size", None) or 64
    channels: int = getattr(config, "num_channels", 3)
    height, width = (size, size) if isinstance(size, int) else size[-2:]
    frames: Any = getattr(config, "num_frames", None) or getattr(config, "max_num_tiles", 2)
    yield torch.randn(_ROWS, channels, height, width)
    yield torch.randn(_ROWS, frames, channels, height, width)
    yield torch.randn(_ROWS, 1, frames, channels, height, width)
    patch = getattr(config, "patch_size", None)
    if isinstance(patch, int):
        yield torch.randn(_ROWS, _PATCHES, channels * patch * patch)


def _features(model: nn.Module) -> Iterator[Tensor]:
    config = _part(model, "audio_config", "encoder_config", "speech_encoder_config")
    names = (
        "num_mel_bins",
        "feature_projection_input_dim",
        "input_feat_per_channel",
        "feat_in",
        "feature_size",
        "input_dim",
    )
    width = next((getattr(config, n) for n in names if hasattr(config, n)), 80)
    frames = 2 * (getattr(config, "max_source_positions", None) or _FRAMES // 2)
    yield torch.randn(_ROWS, width, frames)
    yield torch.randn(_ROWS, frames, width)


def _samples(model: nn.Module) -> Iterator[Tensor]:
    yield torch.randn(_ROWS, _SAMPLES)
    yield torch.randn(_ROWS, 1, _SAMPLES)


def _ids(model: nn.Module) -> Iterator[Tensor]:
    vocabulary = getattr(_part(model, "encoder_config", "text_config"), "vocab_size", 128)
    yield torch.randint(2, vocabulary, (_ROWS, 37))
    codebooks = getattr(_part(model), "num_codebooks", None)
    if isinstance(codebooks, int):
        yield torch.randint(2, vocabulary, (_ROWS, 37, codebooks))
        yield torch.randint(2, vocabulary, (_ROWS, 37, codebooks + 1))  # and text beside them
        yield torch.randint(2, vocabulary, (_ROWS * codebooks, 37))


def _aligned_ids(model: nn.Module, main: Tensor) -> Tensor:
    """Ids for a model that adds its sound to its text, some frames to a token."""
    frames: Any = getattr(_part(model), "audio_length_per_tok", None) or 1
    vocabulary = getattr(_part(model, "text_config"), "vocab_size", 128)
    return torch.randint(2, vocabulary, (_ROWS, main.shape[-1] // frames))


_MAIN = {
    "pixel_values": _images,
    "pixel_values_videos": _images,
    "inputs": _images,
    "input_features": _features,
    "input_values": _samples,
    "input_ids": _ids,
}


def _beside(model: nn.Module, main: Tensor, takes: Any) -> dict[str, Any]:
    """What goes with the main input: decoder ids, and the sizes and masks of images."""
    config, beside = _part(model, "decoder_config", "decoder", "text_config"), dict[str, Any]()
    if "decoder_input_ids" in takes:
        channels = () if main.is_floating_point() else _channels(_part(model, "decoder_config"))
        ids = torch.randint(2, getattr(config, "vocab_size", 128), (_ROWS, _TARGET, *channels))
        beside["decoder_input_ids"] = ids
    if "spatial_shapes" in takes:
        beside["spatial_shapes"] = torch.tensor([[4, 4]] * _ROWS)
        beside["pixel_attention_mask"] = torch.ones(_ROWS, _PATCHES, dtype=torch.int64)
    if "noise" in takes:  # else it draws its own, other at each call
        beside["noise"] = torch.rand(_ROWS, _patches(model, main))
    if "aspect_ratio_ids" in takes:
        beside["aspect_ratio_ids"] = torch.ones(_ROWS, 1, dtype=torch.int64)
        tiles = getattr(model.config, "max_num_tiles", 1)
        beside["aspect_ratio_mask"] = torch.ones(_ROWS, 1, tiles, dtype=torch.int64)
    return beside


def _patches(model: nn.Module, images: Tensor) -> int:
    patch: Any = getattr(_part(model), "patch_size", None) or images.shape[-1]
    height, width = (patch, patch) if isinstance(patch, int) else patch[-2:]
    return int(images.shape[-2] // height) * int(images.shape[-1] // width)


def _channels(config: Any) -> tuple[int, ...]:
    """Decoders of audio tokens take several ids at each position."""
    count = getattr(config, "num_channels", None)
    return (count,) if isinstance(count, int) else ()


def _part(model: nn.Module, *names: str) -> Any:
    """The first of these parts that a composite configuration has, else the whole."""
    config: Any = getattr(model, "config", None)
    found = next((getattr(config, n) for n in names if getattr(config, n, None) is not None), config)
    return config if isinstance(found, dict) else found
