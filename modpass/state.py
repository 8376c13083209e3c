"""Save a traced model and load it again: weights in safetensors, the rest in JSON, nothing pickled."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from modpass.dropout import AttentionDropout
from modpass.errors import BlockError, InputError, StateError, TraceError
from modpass.files import whole_directory
from modpass.mixing import name_of
from modpass.model import RoutedModel
from modpass.restore import AGAIN, build_dense, fill
from modpass.routing import RoutedBlock
from modpass.statefile import FILE, SavedState, describe_examples, draw_examples, dtype_name
from modpass.transform import mod_transform, trace

__all__ = ["load", "save_pretrained"]

WEIGHTS = "model.safetensors"


def save_pretrained(model: RoutedModel, directory: str | os.PathLike[str]) -> None:
    """Write ``model.safetensors`` and ``modpass.json`` into ``directory``, whole or not at all.

    The graph itself is not stored: ``load`` traces the dense model again. A tensor with several names is
    stored once. Buffers that a ``state_dict`` leaves out, such as rotary frequencies, are stored too, so that
    a model that was cast after it was built comes back bit by bit.

    Raises:
        StateError: ``directory`` holds other files, or the model or its settings cannot be written.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> save_pretrained(trace(nn.Linear(3, 3), (torch.randn(2, 3),)), folder); sorted(os.listdir(folder))
    ['model.safetensors', 'modpass.json']
    """
    target = Path(directory).resolve()
    _check_target(target)
    state = model.state_dict()
    buffers = {n: b for n, b in model.named_buffers(remove_duplicate=False) if n not in state}
    tensors, tied = _once({**state, **buffers})
    saved = SavedState(
        settings=_settings(model),
        source=model.info.source,
        attention=_attention(model),
        inputs={s.name: dtype_name(s.dtype) for s in model.inputs},
        examples=describe_examples(model),
        tied=tied,
        buffers=tuple(buffers),
    )
    try:
        with whole_directory(target) as folder:
            saved.save(folder)
            save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
            # safetensors lets nobody but the owner read what it writes.
            shutil.copymode(folder / FILE, folder / WEIGHTS)
    except (OSError, SafetensorError) as e:
        raise StateError(f"'{target}' cannot be written: {e}") from e


def load(directory: str | os.PathLike[str], model: nn.Module | None = None, example_inputs: Any = None) -> RoutedModel:
    """Load what ``save_pretrained`` wrote, in eval mode, with the very same weights, dtypes and ties.

    Args:
        directory: the folder.
        model: the dense model, of the class and configuration that was transformed; it takes over the saved
            weights. May be left out for a class of Hugging Face transformers.
        example_inputs: as in ``mod_transform``; inputs like those of the saved trace by default.

    Raises:
        StateError: the folder is not what ``save_pretrained`` writes, or does not fit the model.
        MissingExtraError: the model is one of transformers, which is not installed.

    >>> import tempfile
    >>> folder, dense = tempfile.mkdtemp(), nn.Linear(3, 3)
    >>> save_pretrained(trace(dense, (torch.randn(2, 3),)), folder)
    >>> torch.equal(load(folder, model=nn.Linear(3, 3))(torch.ones(1, 3)), dense(torch.ones(1, 3)))
    True
    """
    folder = Path(directory)
    saved = SavedState.load(folder)
    tensors = _read_weights(folder, saved)
    dense = build_dense(saved, model, folder)
    own = _added(tensors, saved.settings)
    fill(dense, {n: t for n, t in tensors.items() if n not in own}, saved, folder)
    routed = _traced(dense, saved, _examples(dense, saved, example_inputs, folder), folder)
    for name, block in routed.routed_blocks.items():
        for path, parameter in _parts(block):
            _fill_added(parameter, f"{name}.{path}", tensors, folder)
    routed.eval()
    return routed


# Save


def _check_target(target: Path) -> None:
    """The folder is replaced as a whole, so nothing else may lie in it."""
    if target.exists() and not target.is_dir():
        raise StateError(f"'{target}' is a file; give a folder to save the model in")
    names = [p.name for p in target.iterdir()] if target.is_dir() else []
    if others := sorted(n for n in names if n not in (FILE, WEIGHTS)):
        raise StateError(
            f"'{target}' holds '{others[0]}', which saving would remove; give a new or empty "
            f"folder, or one with nothing but {WEIGHTS} and {FILE}"
        )


def _settings(model: RoutedModel) -> dict[str, Any]:
    """The transform's settings, with the capacities that the blocks have by now."""
    blocks = model.routed_blocks
    for name, block in blocks.items():
        if block.gate_mix != 1.0:
            raise StateError(
                f"block '{name}' has the gate_mix {block.gate_mix}, midway from the unit gate to '{block.gate}'; "
                "end the gate's schedule, or keep the state_dict of model and schedule"
            )
        for option, attribute in (("gate", "gate"), ("selection", "training_selection")):
            found, wanted = getattr(block, attribute), model.settings[option]
            if found != wanted:
                raise StateError(
                    f"block '{name}' has the {option} '{found}', the model was transformed with "
                    f"'{wanted}'; only one {option} for all blocks can be saved"
                )
    switched = {b.eval_selection for b in blocks.values()}
    if len(switched) > 1:
        raise StateError("some blocks select causally in eval mode and some do not; call use_causal on the model")
    later = {"eval_selection": "causal"} if switched == {"causal"} else {}
    return {**model.settings, "capacity": {n: b.capacity for n, b in blocks.items()}, **later} if blocks else {}


def _attention(model: RoutedModel) -> str | None:
    """transformers leaves this choice out of a configuration, and the two kinds differ in the last bits."""
    fused = any(isinstance(m, AttentionDropout) for m in model.modules()) or any(
        name_of(n) == "scaled_dot_product_attention" for g in model.graphs() for n in g.graph.nodes
    )
    return None if fused else "eager"


def _once(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor under its first name, and the first name by each further one."""
    first: dict[Any, str] = {}
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in named.items():
        if tensor.is_meta:
            raise StateError(f"'{name}' is on the meta device and has no values; load weights before saving")
        wraps: bool = is_traceable_wrapper_subclass(tensor)
        if wraps:
            raise StateError(
                f"'{name}' is a {type(tensor).__name__}, which a file of plain tensors cannot hold; save the model "
                "before it is quantised or sharded, and do that again after loading"
            )
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and first.setdefault(place, name) != name:
            tied[name] = first[place]
            continue
        # A view of something larger is copied: safetensors refuses two tensors that share a storage.
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        kept[name] = (tensor if whole else tensor.clone()).detach().contiguous()
    return kept, tied


# Load


def _read_weights(folder: Path, saved: SavedState) -> dict[str, Tensor]:
    """Every tensor by every name; the names of one tensor give one object."""
    path = folder / WEIGHTS
    try:
        tensors = load_file(path)
    except FileNotFoundError as e:
        raise StateError(f"'{folder}' has no {WEIGHTS}; save the model again") from e
    except (OSError, SafetensorError) as e:
        raise StateError(f"'{path}' cannot be read as safetensors: {e}") from e
    for name, first in saved.tied.items():
        if first not in tensors:
            raise StateError(f"'{folder / FILE}' ties '{name}' to '{first}', which {WEIGHTS} does not hold")
        tensors[name] = tensors[first]
    return tensors


def _examples(dense: nn.Module, saved: SavedState, given: Any, folder: Path) -> Any:
    if given is not None:
        return given
    if saved.examples is None:
        raise StateError(
            f"'{folder}' does not say what the model takes (more than tensors and plain "
            "constants); give example_inputs="
        )
    device = next((p.device for p in dense.parameters()), torch.device("cpu"))
    return draw_examples(saved.examples, device)


def _traced(dense: nn.Module, saved: SavedState, examples: Any, folder: Path) -> RoutedModel:
    kind, settings = type(dense).__name__, saved.settings
    try:
        if settings:
            blocks = list(settings["capacity"])
            given = {n: v for n, v in settings.items() if n != "eval_selection"}
            routed = mod_transform(dense, blocks=blocks, example_inputs=examples, **given)
            routed.use_causal("eval_selection" in settings)
        else:
            routed = trace(dense, examples)
    except (BlockError, InputError, TraceError) as e:
        raise StateError(f"'{folder}' does not fit {kind}: {e}") from e
    found = {s.name: dtype_name(s.dtype) for s in routed.inputs}
    if found != dict(saved.inputs):
        raise StateError(
            f"'{folder}' was traced with the inputs {_list(saved.inputs)}, and {kind} is now "
            f"traced with {_list(found)}; give example_inputs= as they were"
        )
    return routed


def _list(inputs: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({dtype})" for name, dtype in inputs.items()) or "none"


def _added(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> set[str]:
    """The names of what routing added to the dense model."""
    parts = ("router.", "predictor.") if settings.get("predictor") else ("router.",)
    fronts = tuple(f"{n}.{part}" for n in settings.get("capacity", {}) for part in parts)
    return {n for n in tensors if fronts and n.startswith(fronts)}


def _parts(block: RoutedBlock) -> Iterator[tuple[str, nn.Parameter]]:
    yield "router.weight", block.router.weight
    if block.predictor is not None:
        yield from ((f"predictor.{n}", p) for n, p in block.predictor.named_parameters())


def _fill_added(weight: nn.Parameter, key: str, tensors: Mapping[str, Tensor], folder: Path) -> None:
    if key not in tensors:
        part = "predictor" if ".predictor." in key else "router"
        raise StateError(f"'{folder}' holds no weight '{key}', the {part} of a block; save the model again")
    if tensors[key].shape != weight.shape:
        raise StateError(
            f"'{key}' has the shape {list(tensors[key].shape)} in '{folder}' and "
            f"{list(weight.shape)} in the model; {AGAIN}"
        )
    weight.data = tensors[key].to(weight.device, weight.dtype)
