"""The options that several commands share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from modpass.errors import InputError
from modpass.functional import check_capacity
from modpass.parts import Parts
from modpass.routing import Gate, Selection

__all__ = [
    "Batch",
    "Blocks",
    "Capacity",
    "Check",
    "Dims",
    "Dtype",
    "DtypeOption",
    "Every",
    "Factory",
    "GateOption",
    "Model",
    "PaddingMask",
    "PartsOption",
    "PredictorOption",
    "Seed",
    "SelectionOption",
    "Sequence",
    "parse_dims",
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
        help="A bundled model (smollm2-135m, minilm-l6, dinov2-small), a folder written by 'modpass "
        "transform', a Hugging Face folder, or package.module:factory.",
    ),
]
Factory = Annotated[
    str | None,
    typer.Option(
        "--factory",
        metavar="MODULE:NAME",
        show_default=False,
        help="Where MODEL is a folder of 'modpass transform' made from no Hugging Face model: the "
        "package.module:factory that builds its dense model.",
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
PartsOption = Annotated[
    Parts | None,
    typer.Option(
        "--parts",
        show_default="block",
        help="Route whole blocks, or of each block the attention or the MLP alone.",
    ),
]
PredictorOption = Annotated[
    bool | None,
    typer.Option(
        "--predictor",
        show_default=False,
        help="Give each routed block a small MLP that learns to choose token by token, for causal selection.",
    ),
]
Check = Annotated[
    bool | None,
    typer.Option(
        "--check/--no-check",
        show_default="check blocks with unknown operators",
        help="Run blocks on permuted and on fewer tokens, and refuse those whose tokens meet outside attention.",
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
Dense = Annotated[bool, typer.Option("--dense", help="Export the dense model, with no block routed.")]
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
