"""The dense model of a saved one, built again and filled with the saved weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from modpass.errors import StateError, require
from modpass.statefile import FILE, SavedState

__all__ = ["build_dense", "fill"]

AGAIN = "give the model that was saved"


def build_dense(saved: SavedState, model: Any, folder: Path) -> nn.Module:
    """The dense model: ``model`` if it is given, else one of transformers, by class and configuration.

    Raises:
        StateError: it can only be built by the caller, or not from the saved configuration.
        MissingExtraError: transformers is not installed.

    >>> build_dense(SavedState({}, {"kind": "module"}, None, {}, None), nn.Identity(), Path())
    Identity()
    """
    if isinstance(model, nn.Module):
        return model
    if model is not None:
        raise StateError(f"model is a {type(model).__name__}; it must be the dense torch.nn.Module")
    if saved.source.get("kind") != "huggingface":
        name = saved.source.get("class") or "exported program"
        raise StateError(
            f"the dense model of '{folder}' is a {name}, which modpass cannot build; build it and give it as model="
        )
    return _from_transformers(saved, folder)


def _from_transformers(saved: SavedState, folder: Path) -> nn.Module:
    kind = _model_class(saved.source.get("class"), folder)
    no_init_weights = require("transformers.initialization", "hf").no_init_weights
    try:
        config = kind.config_class.from_dict(saved.source.get("config"))
        config._attn_implementation = saved.attention
        # Weights stay untouched memory, which takes none until they are replaced; buffers are computed.
        with no_init_weights():
            model: nn.Module = kind(config)
    except Exception as e:
        raise StateError(f"{kind.__name__} cannot be built from the configuration in '{folder / FILE}': {e}") from e
    return model.eval()


def _model_class(name: Any, folder: Path) -> Any:
    """The class of this name in transformers, if it is a model: a file must not call anything else."""
    transformers = require("transformers", "hf")
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
        return kind
    raise StateError(
        f"'{folder}' was made from '{name}', which is no model class of transformers "
        f"{transformers.__version__}; build the dense model and give it as model="
    )


def fill(dense: nn.Module, tensors: Mapping[str, Tensor], saved: SavedState, folder: Path) -> None:
    """Put the saved tensors in the place of the model's own, so that dtypes and ties are the saved ones.

    Raises:
        StateError: a key is missing, has no place in the model, or has another shape; nothing is changed.

    >>> linear = nn.Linear(1, 1, bias=False)
    >>> fill(linear, {"weight": Tensor([[2.0]])}, SavedState({}, {}, None, {}, None), Path())
    >>> linear.weight.item()
    2.0
    """
    own = dense.state_dict(keep_vars=True)
    places = {**dict(dense.named_buffers(remove_duplicate=False)), **own}
    # A stored buffer without a place is a constant of the graph, which the next trace makes again.
    found = {n: t for n, t in tensors.items() if n in places or n not in saved.buffers}
    _check(type(dense).__name__, own, places, found, folder)
    made: dict[tuple[int, bool], Tensor] = {}
    for name, tensor in found.items():
        current = places[name]
        key = (id(tensor), isinstance(current, nn.Parameter))
        if key not in made:
            made[key] = _like(current, tensor)
        _place(dense, name, made[key])


def _check(
    kind: str,
    own: Mapping[str, Tensor],
    places: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    folder: Path,
) -> None:
    if missing := [n for n in own if n not in found]:
        raise StateError(f"'{folder}' holds no weight '{missing[0]}', which {kind} has{_more(missing)}; {AGAIN}")
    if unknown := [n for n in found if n not in places]:
        raise StateError(
            f"'{folder}' holds the weight '{unknown[0]}', which {kind} does not have{_more(unknown)}; {AGAIN}"
        )
    for name, tensor in found.items():
        if places[name].shape != tensor.shape:
            raise StateError(
                f"'{name}' has the shape {list(tensor.shape)} in '{folder}' and "
                f"{list(places[name].shape)} in {kind}; {AGAIN}"
            )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _like(current: Tensor, tensor: Tensor) -> Tensor:
    moved = tensor if current.is_meta else tensor.to(current.device)
    if isinstance(current, nn.Parameter):
        return nn.Parameter(moved, requires_grad=current.requires_grad)
    return moved


def _place(module: nn.Module, path: str, tensor: Tensor) -> None:
    holder, _, leaf = path.rpartition(".")
    owner = module.get_submodule(holder)
    if isinstance(tensor, nn.Parameter):
        owner._parameters[leaf] = tensor
    else:
        owner._buffers[leaf] = tensor
