"""``modpass export-decoder``: MODEL to a folder that generates text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modpass.cli.console import console, mebibytes, status
from modpass.cli.options import Batch, Blocks, Capacity, Dense, Every, Factory, GateOption, Model, Seed
from modpass.cli.source import Routing, is_routed, load_source, refuse_routed, traced_dense
from modpass.decode.block import Skipping
from modpass.errors import MissingExtraError
from modpass.model import RoutedModel

if TYPE_CHECKING:
    from modpass.bench import Source

__all__ = ["command"]

Out = Annotated[
    Path, typer.Argument(metavar="OUT_DIR", file_okay=False, show_default=False, help="The folder to write.")
]
Prompt = Annotated[
    int, typer.Option("--prompt", metavar="N", min=1, help="Tokens that are read at once; longer prompts go on singly.")
]
MaxSequence = Annotated[
    int, typer.Option("--max-sequence", metavar="N", min=1, help="Tokens that the caches hold, prompt and answer.")
]
SkippingOption = Annotated[
    Skipping | None,
    typer.Option(
        "--skipping",
        show_default="conditional for one row, else masked",
        help="How a routed block is skipped: not run, run and dropped, or run for the best rows alone.",
    ),
]


def command(
    model: Model,
    out: Out,
    batch: Batch = 1,
    prompt: Prompt = 128,
    max_sequence: MaxSequence = 1024,
    skipping: SkippingOption = None,
    dense: Dense = False,
    capacity: Capacity = None,
    every: Every = None,
    blocks: Blocks = None,
    gate: GateOption = None,
    seed: Seed = 0,
    factory: Factory = None,
) -> None:
    """Write MODEL as graphs that generate text.

    The folder holds a prefill and a decode graph over caches that share one file of weights, and the tokenizer
    where there is one; 'modpass generate' runs it. A dense MODEL is routed first, with causal selection, unless
    --dense.
    """
    from modpass.exporters.decoder import export_decoder
    from modpass.exporters.decoder_manifest import FILE
    from modpass.exporters.own_folder import own_folder

    own_folder(out, FILE)  # before a model is loaded
    routing = Routing(capacity, every, blocks, gate, "causal", None)
    with status("loading"):
        source = load_source(model, factory=factory)
    if dense:
        refuse_routed(source, "dense")
    with status("tracing"):
        traced = traced_dense(source) if dense else _causal(routing, source, seed)
    with status("exporting"):
        manifest = export_decoder(
            traced, out, batch=batch, prompt=prompt, max_sequence=max_sequence, skipping=skipping,
            tokenizer=_tokenizer(model),
        )  # fmt: skip
    files = [n for n in manifest.files if "/" not in n]  # without those of the tokenizer
    sizes = ", ".join(f"{n} {mebibytes((out / n).stat().st_size)}" for n in files)
    caches = [*manifest.caches, *(c for r in manifest.routing for c in r.caches)]
    console().print(f"wrote {out} ({sizes})", markup=False)
    console().print(
        f"{len(caches)} caches for {max_sequence} tokens; {len(manifest.routing)} routed blocks, {manifest.skipping}",
        markup=False,
    )


def _causal(routing: Routing, source: Source, seed: int) -> RoutedModel:
    """Routed with causal selection; a model that is routed already keeps its routers."""
    if not is_routed(source):
        return routing.apply(source, seed)
    refuse_routed(source, *(n for n in routing.given() if n != "selection"))
    assert isinstance(source.model, RoutedModel)
    for block in source.model.routed_blocks.values():
        block.selection = "causal"
    return source.model


def _tokenizer(spec: str) -> Any:
    """The tokenizer of a bundled model or of a Hugging Face folder, where there is one."""
    from modpass.bench.models import BUNDLED, load_tokenizer

    if spec in BUNDLED:
        return load_tokenizer(spec) if BUNDLED[spec].tokenizer is not None else None
    if not (Path(spec, "tokenizer.json").is_file() or Path(spec, "tokenizer_config.json").is_file()):
        return None
    try:
        from transformers import AutoTokenizer
    except ImportError as e:
        raise MissingExtraError("reading a tokenizer needs transformers; pip install 'modpass[hf]'") from e
    return AutoTokenizer.from_pretrained(spec, local_files_only=True)
