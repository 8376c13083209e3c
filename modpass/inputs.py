"""Example inputs: those the user gave, or those the model says it takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from modpass.errors import InputError

__all__ = ["as_named", "infer_inputs"]

# Odd sizes, so that a traced batch or sequence is never mistaken for a width.
BATCH, SEQUENCE, TARGET, FRAMES, SAMPLES = 2, 37, 31, 76, 6400


def as_named(model: nn.Module, example_inputs: Any) -> dict[str, Any]:
    """Example inputs by parameter name, from a tensor, a tuple, a dict or ``(tuple, dict)``.

    Raises:
        InputError: they do not fit the model's ``forward``, or none were given and the model does not say.

    >>> list(as_named(nn.Identity(), torch.zeros(1)))
    ['input']
    """
    if example_inputs is None:
        return infer_inputs(model)
    args, kwargs = _split(example_inputs)
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as e:
        raise InputError(f"example_inputs do not fit {type(model).__name__}.forward: {e}") from e
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = inspect.signature(model.forward).parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            raise InputError(f"{type(model).__name__}.forward takes *{name}; wrap it in a module with named inputs")
        else:
            named[name] = value
    return _no_cache(model, named)


def _split(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, tuple | list):
        match list(example_inputs):
            case [tuple() as args, dict() as kwargs]:
                return args, kwargs
            case values:
                return tuple(values), {}
    raise InputError(f"example_inputs is a {type(example_inputs).__name__}; give a tuple, a dict or (tuple, dict)")


def _no_cache(model: nn.Module, named: dict[str, Any]) -> dict[str, Any]:
    """Trace the plain forward: a key/value cache is derived by its own pass."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        named.setdefault("use_cache", False)
    return named


def infer_inputs(model: nn.Module) -> dict[str, Any]:
    """Inputs of a Hugging Face or timm model, by what its own configuration says.

    Raises:
        InputError: the model does not say what it takes.
    """
    named: dict[str, Any] = {}
    if hasattr(model, "config") and isinstance(getattr(model, "main_input_name", None), str):
        try:
            named = _from_config(model)
        except (AttributeError, KeyError, TypeError):
            named = {}
    elif isinstance(cfg := getattr(model, "pretrained_cfg", None), Mapping) and "input_size" in cfg:
        named = {parameter(model): torch.randn(BATCH, *cfg["input_size"])}
    if not named:
        raise InputError(
            f"{type(model).__name__} does not say what it takes; pass example_inputs "
            "(a tuple, a dict or both), with a batch of 2 or more rows; a factory that a command is given returns "
            "the pair (model, example inputs)"
        )
    reference = next((p for p in model.parameters() if p.is_floating_point()), None)
    if reference is not None:
        named = {
            n: v.to(reference.device, reference.dtype if v.is_floating_point() else None) for n, v in named.items()
        }
    return _no_cache(model, named)


def parameter(model: nn.Module) -> str:
    """Name of the first input of ``model.forward``."""
    return next(iter(inspect.signature(model.forward).parameters))


def _from_config(model: nn.Module) -> dict[str, Any]:
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    main: str = model.main_input_name  # type: ignore[assignment]
    takes = inspect.signature(model.forward).parameters
    if main == "pixel_values":
        return {main: torch.randn(_image_shape(config))}
    limit = getattr(text, "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) and limit > 0 else 4096
    if main == "input_ids":
        named = _tokens("input_ids", "attention_mask", min(SEQUENCE, limit), text.vocab_size, takes)
    elif main in ("input_features", "input_values"):
        named = {main: torch.randn(_sound_shape(config, main))}
    else:
        dummy = dict(getattr(model, "dummy_inputs", {}) or {})
        return {n: _rows(v) for n, v in dummy.items() if isinstance(v, Tensor) and n in takes}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:  # its encoder alone does not
        named |= _tokens("decoder_input_ids", "decoder_attention_mask", min(TARGET, limit), text.vocab_size, takes)
    return named


def _tokens(ids: str, mask: str, sequence: int, vocabulary: int, takes: Mapping[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    named = {ids: torch.randint(2, vocabulary, (BATCH, sequence), generator=generator)}
    if mask in takes:
        named[mask] = torch.ones(BATCH, sequence, dtype=torch.int64)
    return named


def _image_shape(config: Any) -> tuple[int, ...]:
    """``[B, channels, height, width]``, with frames after the batch for video."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    frames = getattr(vision, "num_frames", None)
    return (BATCH, *([frames] if frames else []), getattr(vision, "num_channels", 3), height, width)


def _sound_shape(config: Any, main: str) -> tuple[int, ...]:
    """Samples, or spectra as the names of the configuration's fields lay them out."""
    if main == "input_values":
        return BATCH, SAMPLES
    if hasattr(config, "input_feat_per_channel"):
        return BATCH, FRAMES, config.input_feat_per_channel
    positions = getattr(config, "max_source_positions", None)
    return BATCH, config.num_mel_bins, 2 * positions if positions else FRAMES


def _rows(value: Tensor) -> Tensor:
    """Two rows at least: a batch of one would be traced as a constant."""
    return value if value.shape[0] > 1 else value.repeat(BATCH, *[1] * (value.dim() - 1))


def widen(named: dict[str, Any]) -> dict[str, Any]:
    """Repeat a batch of one to two rows where every tensor has one, so that the batch stays free."""
    leaves = [v for v in pytree.tree_leaves(named) if isinstance(v, Tensor) and v.dim()]
    if leaves and all(v.shape[0] == 1 for v in leaves):
        wide: dict[str, Any] = pytree.tree_map_only(Tensor, lambda v: _rows(v) if v.dim() else v, named)
        return wide
    return named
