"""The MODEL argument of the command line: one string that names a model of four kinds."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import modpass
from modpass.bench.models import BUNDLED, load_bundled
from modpass.bench.offline import no_progress_bar, transformers_offline
from modpass.errors import InputError, MissingExtraError

__all__ = ["ALLOWED", "Source", "load_model"]

ALLOWED = (
    f"a bundled model ({', '.join(BUNDLED)}), a folder saved by modpass (with modpass.json), "
    "a Hugging Face folder (with config.json), or package.module:factory"
)


@dataclass(frozen=True)
class Source:
    """A loaded model, an example call where its configuration does not say how, and its name in reports."""

    model: nn.Module
    example_inputs: Any
    name: str


def load_model(spec: str, dtype: torch.dtype = torch.float32) -> Source:
    """Load what ``spec`` names: a bundled model, a saved one, a Hugging Face folder or ``module:factory``.

    Args:
        spec: the string. A factory takes no argument and returns a module, or (module, example inputs).
        dtype: of the weights of a bundled model or a Hugging Face folder; the other two keep their own.

    Raises:
        InputError: ``spec`` names nothing of the four kinds, or what it names cannot be loaded.
        MissingExtraError: a package or a wheel that this kind needs is not installed.

    >>> load_model("torch.nn:Identity").model
    Identity()
    """
    if spec in BUNDLED:
        return Source(load_bundled(spec, dtype), None, spec)
    folder = Path(spec)
    if folder.is_dir():
        return _from_folder(folder, dtype)
    if ":" in spec:
        return _from_factory(spec)
    found = "is a file" if folder.is_file() else "is not there"
    raise InputError(f"MODEL '{spec}' {found}; it may be {ALLOWED}")


def _from_folder(folder: Path, dtype: torch.dtype) -> Source:
    name = folder.resolve().name
    if (folder / "modpass.json").is_file():
        return Source(modpass.load(folder), None, name)
    if not (folder / "config.json").is_file():
        raise InputError(f"MODEL '{folder}' is a folder with neither modpass.json nor config.json; it may be {ALLOWED}")
    return Source(_from_hugging_face(folder, dtype), None, name)


def _from_hugging_face(folder: Path, dtype: torch.dtype) -> nn.Module:
    transformers = transformers_offline("hf")
    name = _architecture(folder)
    architecture = getattr(transformers, name, None)
    if architecture is None:
        raise InputError(
            f"{folder / 'config.json'} names the architecture '{name}', which transformers "
            f"{transformers.__version__} does not have; use a version that has it, or package.module:factory"
        )
    try:
        with no_progress_bar(transformers):
            model: nn.Module = architecture.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as e:
        raise InputError(f"the weights in '{folder}' could not be loaded as {name}: {e}") from e
    return model.eval()


def _architecture(folder: Path) -> str:
    path = folder / "config.json"
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["architectures"]
        return str(names[0])
    except (ValueError, TypeError, LookupError) as e:
        raise InputError(
            f"{path} names no architecture; it needs 'architectures', a list with one class of transformers"
        ) from e


def _from_factory(spec: str) -> Source:
    made = _factory(spec)()
    model, example_inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"factory '{spec}' returned {type(model).__name__}; it must return a torch.nn.Module, "
            "or a pair (torch.nn.Module, example inputs)"
        )
    return Source(model.eval(), example_inputs, spec)


def _factory(spec: str) -> Any:
    module_name, _, attribute = spec.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise InputError(f"MODEL '{spec}' is not of the form package.module:factory; it may be {ALLOWED}")
    # As `python -m` does: a module beside the caller is found without being installed.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        factory = getattr(importlib.import_module(module_name), attribute, None)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module_name}.".startswith(f"{e.name}."):
            raise MissingExtraError(f"factory '{spec}' imports '{e.name}', which is not installed; install it") from e
        raise InputError(f"MODEL '{spec}' names the module '{module_name}', which cannot be found") from e
    if not callable(factory):
        found = "has no such name" if factory is None else f"holds a {type(factory).__name__} there"
        raise InputError(f"MODEL '{spec}' needs a function '{attribute}' in '{module_name}', which {found}")
    return factory
