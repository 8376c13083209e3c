"""all-MiniLM-L6-v2 from its safetensors file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from modpass.bench.offline import no_progress_bar, transformers_offline

__all__ = ["load_minilm"]


def load_minilm(weights: Path, dtype: torch.dtype) -> nn.Module:
    """``transformers.BertModel`` with the weights beside ``config.json`` in the folder of ``weights``.

    Source: the layout of Hugging Face model folders.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    transformers = transformers_offline("models")
    with no_progress_bar(transformers):
        model: nn.Module = transformers.BertModel.from_pretrained(weights.parent, dtype=dtype, local_files_only=True)
    return model
