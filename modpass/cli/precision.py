"""The options of ``modpass export`` for weights in few bits, and for the error that is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = ["Islands", "MaxError", "Quantise", "refuse_precision"]

Quantise = Annotated[
    Literal["int8", "int4", "fp8"] | None,
    typer.Option(
        "--quantise",
        show_default=False,
        help="Weights of matrix products in 8 or 4 bits; the rest stays as --dtype says. Writes opset 21.",
    ),
]
MaxError = Annotated[
    float | None,
    typer.Option(
        "--max-error",
        metavar="X",
        show_default=False,
        help="Run the file beside PyTorch first, and write nothing if an output is off by more than X, as a share of "
        "its largest value.",
    ),
]


Islands = Annotated[
    Literal["rule", "measured"],
    typer.Option(
        "--islands",
        help="What beside routers stays in float32 in half precision: norms and position tables by rule, or what "
        "a run on drawn inputs shows to need it.",
    ),
]


def refuse_precision(quantise: str | None, max_error: float | None, verify: bool | None, out: Path | None) -> None:
    """Refuse options that do not go together.

    Raises:
        typer.BadParameter: they do not.
    """
    if max_error is not None and not max_error > 0:
        raise typer.BadParameter(f"{max_error:g} is not above 0", param_hint="'--max-error'")
    if max_error is not None and verify is False:
        raise typer.BadParameter(
            "only a file that is run can be refused; leave out --no-verify", param_hint="'--max-error'"
        )
    if out is None and (quantise or max_error is not None):
        flag = "--quantise" if quantise else "--max-error"
        raise typer.BadParameter(
            "it goes with one file, OUT.onnx, not with --buckets or --triton", param_hint=f"'{flag}'"
        )
