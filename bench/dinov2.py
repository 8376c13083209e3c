"""DINOv2 ViT-S/14: the backbone inside an ONNX file, put back into a Dinov2Model of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from modpass.bench.offline import no_progress_bar, transformers_offline
from modpass.errors import StateError

__all__ = ["PIXELS", "load_dinov2"]

PIXELS = 224
_TRAINED_PIXELS, _PATCH, _WIDTH = 518, 14, 384
_PREFIX = "backbone."

Arrays = dict[str, NDArray[Any]]


def load_dinov2(weights: Path, dtype: torch.dtype) -> nn.Module:
    """``transformers.Dinov2Model`` for images of 224 px: [B, 3, 224, 224] to hidden states [B, 257, 384].

    The table of positions, trained at 518 px, is resized here once, as the model itself would on every call.

    Raises:
        StateError: the ONNX file does not hold such a backbone.

    >>> (PIXELS // 14) ** 2 + 1
    257
    """
    import onnx  # here, not above: a machine that measures with torch alone may lack it

    transformers = transformers_offline("models")
    config = transformers.Dinov2Config(
        hidden_size=_WIDTH,
        num_hidden_layers=12,
        num_attention_heads=6,
        patch_size=_PATCH,
        image_size=_TRAINED_PIXELS,
        use_mask_token=False,  # it belongs to training, and the file has none
    )
    state = {name: torch.from_numpy(np.array(array)) for name, array in _state(onnx.load(weights).graph)}
    # from_pretrained, not load_state_dict: it maps the file's older names of the attention weights.
    with no_progress_bar(transformers):
        model, info = transformers.Dinov2Model.from_pretrained(
            None, config=config, state_dict=state, output_loading_info=True
        )
    if info["missing_keys"]:
        raise StateError(f"{weights.name} has no weights for {', '.join(sorted(info['missing_keys']))}")
    model = _resized(model).to(dtype)
    return cast(nn.Module, model)


def _state(graph: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    """The backbone's weights under the names of transformers 4."""
    from onnx import numpy_helper

    arrays: Arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    yield from ((name.removeprefix(_PREFIX), a) for name, a in arrays.items() if name.startswith(_PREFIX))
    yield from _linear_weights(graph, arrays)
    grid = (_TRAINED_PIXELS // _PATCH) ** 2
    table = [_positions(arrays, tokens) for tokens in (1, grid)]
    yield "embeddings.position_embeddings", np.concatenate(table, axis=1)


def _linear_weights(graph: Any, arrays: Arrays) -> Iterator[tuple[str, NDArray[Any]]]:
    """Weights of linear layers, which the file holds transposed and nameless: the node's path names them."""
    for node in graph.node:
        if node.op_type == "MatMul" and node.name.startswith("/backbone/") and node.input[1] in arrays:
            path = node.name.removeprefix("/backbone/").rsplit("/", 1)[0].replace("/", ".")
            yield f"{path}.weight", arrays[node.input[1]].T


def _positions(arrays: Arrays, tokens: int) -> NDArray[Any]:
    """The one nameless constant that holds the positions of so many tokens."""
    shape = (1, tokens, _WIDTH)
    found = [a for name, a in arrays.items() if a.shape == shape and not name.startswith(_PREFIX)]
    if len(found) != 1:
        raise StateError(f"the ONNX file has {len(found)} constants of shape {list(shape)}; one is needed")
    return found[0]


def _resized(model: Any) -> Any:
    embeddings = model.embeddings
    tokens = torch.empty(1, (PIXELS // _PATCH) ** 2 + 1, _WIDTH)
    with torch.no_grad():
        table = embeddings.interpolate_pos_encoding(tokens, PIXELS, PIXELS)
    embeddings.position_embeddings = nn.Parameter(table.contiguous())
    model.config.image_size = PIXELS
    embeddings.patch_embeddings.image_size = (PIXELS, PIXELS)
    embeddings.patch_embeddings.num_patches = tokens.shape[1] - 1
    return model
