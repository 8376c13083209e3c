"""MODEL, loaded and routed as the options say."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typer

from modpass.cli.options import Dtype
from modpass.model import RoutedModel
from modpass.parts import Parts
from modpass.routing import Gate, Selection
from modpass.state import load
from modpass.statefile import FILE, SavedState
from modpass.transform import mod_transform, trace

if TYPE_CHECKING:
    from modpass.bench import Source

__all__ = ["Routing", "is_routed", "load_source", "refuse_routed", "traced_dense"]


@dataclass(frozen=True)
class Routing:
    """The options of the transform, each None where it was not given."""

    capacity: float | None = None
    every: int | None = None
    blocks: list[str] | None = None
    gate: Gate | None = None
    selection: Selection | None = None
    padding_mask: str | None = None
    parts: Parts | None = None
    check: bool | None = None
    predictor: bool | None = None

    def given(self) -> dict[str, Any]:
        """The options that were given, as ``mod_transform`` takes them."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found["blocks"] = [n for names in self.blocks or () for n in names.split(",") if n] or None
        return {name: value for name, value in found.items() if value is not None}

    def apply(self, source: Source, seed: int) -> RoutedModel:
        """Transform the model; one that is routed already keeps its routing.

        Raises:
            typer.BadParameter: options were given that such a model cannot follow.
            TraceError, BlockError, InputError: from ``mod_transform``.
        """
        refuse_routed(source, *self.given())
        if isinstance(source.model, RoutedModel) and source.model.routed_blocks:
            return source.model
        torch.manual_seed(seed)
        return mod_transform(source.model, example_inputs=source.example_inputs, **self.given())


def refuse_routed(source: Source, *options: str) -> None:
    """Refuse options that a model with its own routing cannot follow.

    Raises:
        typer.BadParameter: the model is routed, and there is such an option.
    """
    if options and is_routed(source):
        flag = "--" + options[0].replace("_", "-")
        message = f"'{source.name}' is routed already and keeps its own settings; leave it out"
        raise typer.BadParameter(message, param_hint=f"'{flag}'")


def is_routed(source: Source) -> bool:
    """Whether the model brings routed blocks of its own."""
    return isinstance(source.model, RoutedModel) and bool(source.model.routed_blocks)


def load_source(spec: str, dtype: Dtype = "float32", factory: str | None = None) -> Source:
    """Load MODEL; a traced one brings its example inputs along.

    Raises:
        typer.BadParameter: a saved model needs ``factory`` and has none, or the other way round.
        InputError: MODEL names no model.
        StateError: the saved model cannot be read, or does not fit.
        MissingExtraError: a package that it needs is not installed.
    """
    from modpass.bench import load_model

    wanted = _foreign_class(spec)
    if factory is not None and wanted is None:
        raise typer.BadParameter(f"'{spec}' is no saved model that needs one; leave it out", param_hint="'--factory'")
    if factory is None and wanted is not None:
        message = f"'{spec}' was made from {wanted}, which only a function of yours can build; name it"
        raise typer.BadParameter(message, param_hint="'--factory'")
    if factory is not None:
        dense = load_model(factory)
        source = replace(dense, model=load(spec, dense.model), name=Path(spec).resolve().name)
    else:
        source = load_model(spec, getattr(torch, dtype))
    if isinstance(source.model, RoutedModel):
        return replace(source, example_inputs={s.name: s.example for s in source.model.inputs})
    return source


def traced_dense(source: Source) -> RoutedModel:
    """The dense model, traced."""
    return source.model if isinstance(source.model, RoutedModel) else trace(source.model, source.example_inputs)


def _foreign_class(spec: str) -> str | None:
    """The class of a saved model's dense form, where modpass cannot build it."""
    if not Path(spec, FILE).is_file():
        return None
    source = SavedState.load(Path(spec)).source
    return None if source.get("kind") == "huggingface" else str(source.get("class") or "an exported program")
