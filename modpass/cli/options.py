"""The options that several commands share, and the loading of MODEL."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import typer

from modpass.errors import InputError
from modpass.functional import check_capacity
from modpass.model import RoutedModel
from modpass.routing import Gate, Selection
from modpass.transform import mod_transform

if TYPE_CHECKING:
    from modpass.bench import Source

__all__ = [
    "Batch",
    "Blocks",
    "Capacity",
    "Dims",
    "Dtype",
    "DtypeOption",
    "Every",
    "GateOption",
    "Model",
    "PaddingMask",
    "Routing",
    "Seed",
    "SelectionOption",
    "Sequence",
    "load_source",
    "parse_dims",
    "refuse_routed",
]

Dtype = Literal["float32", "float16", "bfloat16"]


def _capacity(value: float | None) -> float | None:
    try:
        return value if value is None else check_capacity(value)
    except InputError as e:
        raise typer.BadParameter(str(e)) from e


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="A bundled model (smollm2-135m, minilm-l6, dinov2-small), a folder written by 'modpass transform', "
        "a Hugging Face folder, or package.module:factory.",
    ),
]
Capacity = Annotated[
    float | None,
    typer.Option(
        "--capacity",
        metavar="SHARE",
        callback=_capacity,
        show_default="0.125",
        help="Share of the tokens that go through a routed block, above 0 and up to 1.",
    ),
]
Every = Annotated[
    int | None,
    typer.Option(
        "--every",
        metavar="N",
        min=1,
        show_default="2",
        help="Route every N-th block of a stack, starting with the N-th.",
    ),
]
Blocks = Annotated[
    list[str] | None,
    typer.Option(
        "--blocks",
        metavar="NAME[,NAME]",
        show_default=False,
        help="Route these blocks, by the names of 'modpass inspect', instead of every N-th. May be repeated.",
    ),
]
GateOption = Annotated[
    Gate | None,
    typer.Option(
        "--gate",
        show_default="linear",
        help="What a block's change is multiplied by: the router's score, its sigmoid, or 1.",
    ),
]
SelectionOption = Annotated[
    Selection | None,
    typer.Option(
        "--selection",
        show_default="expert_choice",
        help="How tokens are chosen: by the router's scores, or by noise (a control, not for export).",
    ),
]
PaddingMask = Annotated[
    str | None,
    typer.Option(
        "--padding-mask",
        metavar="INPUT",
        show_default="attention_mask",
        help="The [batch, sequence] input whose zeros are padding; ~INPUT where its ones are.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the new routers' random weights.")]
Batch = Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Sequences (or images) per call.")]
Sequence = Annotated[
    int | None,
    typer.Option(
        "--sequence",
        metavar="N",
        min=1,
        show_default=False,
        help="Tokens per sequence. Needed, unless the inputs' sizes fix it, as an image's do.",
    ),
]
Dims = Annotated[
    list[str] | None,
    typer.Option(
        "--dim",
        metavar="NAME=N",
        show_default=False,
        help="Size of another free dim, such as decoder_input_ids.1=64. May be repeated.",
    ),
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Type of the weights that are loaded.")]


@dataclass(frozen=True)
class Routing:
    """The options of the transform, each None where it was not given."""

    capacity: float | None = None
    every: int | None = None
    blocks: list[str] | None = None
    gate: Gate | None = None
    selection: Selection | None = None
    padding_mask: str | None = None

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
    if options and isinstance(source.model, RoutedModel) and source.model.routed_blocks:
        flag = "--" + options[0].replace("_", "-")
        message = f"'{source.name}' is routed already and keeps its own settings; leave it out"
        raise typer.BadParameter(message, param_hint=f"'{flag}'")


def load_source(spec: str, dtype: Dtype = "float32") -> Source:
    """Load MODEL; a traced one brings its example inputs along.

    Raises:
        InputError: MODEL names no model.
        MissingExtraError: a package that it needs is not installed.
    """
    from modpass.bench import load_model

    source = load_model(spec, getattr(torch, dtype))
    if isinstance(source.model, RoutedModel):
        return replace(source, example_inputs={s.name: s.example for s in source.model.inputs})
    return source


def parse_dims(values: list[str] | None) -> dict[str, int]:
    """Sizes by name from ``NAME=N`` texts.

    Raises:
        typer.BadParameter: a text is not of this form, or N is no whole number of 1 or more.

    >>> parse_dims(["decoder_input_ids.1=64"])
    {'decoder_input_ids.1': 64}
    """
    dims: dict[str, int] = {}
    for value in values or ():
        name, _, size = value.rpartition("=")
        if not name or not size.isdecimal() or int(size) < 1:
            message = f"'{value}' is not of the form NAME=N with a whole number N of 1 or more"
            raise typer.BadParameter(message, param_hint="'--dim'")
        dims[name] = int(size)
    return dims
