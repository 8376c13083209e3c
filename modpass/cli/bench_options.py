"""The options of ``modpass bench`` that hold several values, or bounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import typer

from modpass.cli.options import Dtype
from modpass.errors import InputError
from modpass.functional import check_capacity

__all__ = [
    "BatchSizes",
    "BlockTimes",
    "Capacities",
    "Compare",
    "CompareBy",
    "Dtypes",
    "FailIfSlower",
    "Fresh",
    "Judge",
    "Out",
    "Peers",
    "Repeats",
    "Runners",
    "Seconds",
    "Sequences",
    "Warmup",
    "split",
]

T = TypeVar("T")


def split(text: str | None, parse: Callable[[str], T], flag: str) -> list[T]:
    """The values of a text with commas, each of them once.

    Raises:
        typer.BadParameter: one of them cannot be parsed.

    >>> split("1,4,1", int, "--batch")
    [1, 4]
    """
    found: dict[T, None] = {}
    for part in (p.strip() for p in (text or "").split(",")):
        if part or (text or "").strip():
            try:
                found[parse(part)] = None
            except (ValueError, InputError) as e:
                raise typer.BadParameter(f"'{part}': {e}", param_hint=f"'{flag}'") from e
    return list(found)


def count(text: str) -> int:
    """A whole number of 1 or more.

    Raises:
        ValueError: it is none.

    >>> count("16")
    16
    """
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("a whole number of 1 or more is needed; several are given with commas, as 1,4")
    return int(text)


def share(text: str) -> float:
    """A capacity.

    Raises:
        ValueError, InputError: it is none.

    >>> share("0.125")
    0.125
    """
    try:
        number = float(text)
    except ValueError as e:
        raise ValueError("a number is needed; several are given with commas, as 0.125,0.5") from e
    return check_capacity(number, "the sweep")


def dtype(text: str) -> Dtype:
    """One of the three dtypes.

    Raises:
        ValueError: it is none of them.

    >>> dtype("float16")
    'float16'
    """
    found: Dtype | None = next((d for d in get_args(Dtype) if d == text), None)
    if found is None:
        raise ValueError(f"the weights may be {', '.join(get_args(Dtype))}")
    return found


def percent(text: Any) -> float:
    """A share from ``5%`` or ``0.05``.

    Raises:
        typer.BadParameter: it is no such number.

    >>> percent("5%")
    0.05
    """
    try:
        value = float(str(text).removesuffix("%")) / (100 if str(text).endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise typer.BadParameter(f"'{text}' is no share; give one as 5% or 0.05")
    return value


def _many(flag: str, metavar: str, default: str, text: str) -> Any:
    return typer.Option(flag, metavar=f"{metavar}[,{metavar}]", show_default=default, help=text)


Capacities = Annotated[
    str | None, _many("--capacity", "SHARE", "0.125", "Share of the tokens that go through a routed block, up to 1.")
]
Sequences = Annotated[
    str | None,
    _many(
        "--sequence",
        "N",
        "the model's case",
        "Tokens per sequence. Needed for a model that is not bundled, unless its inputs' sizes fix it.",
    ),
]
BatchSizes = Annotated[str | None, _many("--batch", "N", "1", "Sequences (or images) per call.")]
Dtypes = Annotated[
    str | None, _many("--dtype", "NAME", "float32", "Type of the weights: float32, float16 or bfloat16.")
]
Runners = Annotated[
    list[str] | None,
    typer.Option(
        "--runner",
        metavar="NAME[,NAME]",
        show_default="all",
        help="A way to run: torch, torch-compile, onnxruntime, torch-cuda, torch-compile-cuda, torch-graphs-cuda, "
        "onnxruntime-cuda, onnxruntime-tensorrt, tensorrt, tensorrt-rtx. May be repeated; one that cannot run here "
        "is listed with the reason.",
    ),
]
Seconds = Annotated[
    float,
    typer.Option(
        "--seconds",
        metavar="S",
        min=0,
        help="Measure each runner for this long at least, in seconds of calls.",
    ),
]
Repeats = Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Measured rounds at least.")]
Warmup = Annotated[int, typer.Option("--warmup", metavar="N", min=0, help="Rounds dropped before measuring.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        file_okay=False,
        show_default="none",
        help="Also write a report into this folder: JSON, markdown, HTML (pip install 'modpass[bench]'). Each row is "
        "kept there as soon as it is measured; the same command goes on where it was stopped.",
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="With --out: measure again what is kept there.")]
Peers = Annotated[
    bool,
    typer.Option(
        "--peers/--no-peers",
        help="With onnxruntime: also measure the dense model as torch.onnx.export writes it by itself, and that file "
        "through ONNX Runtime's own transformer optimiser.",
    ),
]
BlockTimes = Annotated[
    bool, typer.Option("--blocks/--no-blocks", help="With torch and onnxruntime: also profile the time in each block.")
]
Compare = Annotated[
    Path | None,
    typer.Option(
        "--compare",
        metavar="JSON",
        dir_okay=False,
        show_default="none",
        help="The JSON of an earlier report: show what changed since, beside how noisy it was.",
    ),
]
FailIfSlower = Annotated[
    float | None,
    typer.Option(
        "--fail-if-slower",
        metavar="SHARE",
        parser=percent,
        show_default="never",
        help="With --compare: fail, naming the rows, where a median became worse by more than this, as 5%.",
    ),
]
CompareBy = Annotated[
    Literal["both", "ratio", "time"],
    typer.Option(
        "--compare-by",
        help="What --fail-if-slower judges: the ratio routed over dense, which is steady on a noisy machine; the "
        "times, on the same machine alone; or both.",
    ),
]
Judge = Annotated[
    bool,
    typer.Option(
        "--judge",
        help="Hold the rows against the project's bounds (efficiency 97 %, cost of routing every token 2 %, dense no "
        "slower than the plain exporter's file), print pass or fail for each, and fail if one does.",
    ),
]
