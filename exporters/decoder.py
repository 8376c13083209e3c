"""A causal model -> a folder with a prefill and a decode graph that share one weights file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from modpass.decode import PrefillModel, StepModel, decode_step, prefill
from modpass.decode.block import Skipping
from modpass.errors import InputError
from modpass.exporters.conversion import Precision
from modpass.exporters.decoder_facts import describe, logits_of, vocabulary
from modpass.exporters.decoder_manifest import FILE, TOKENIZER, DecoderManifest
from modpass.exporters.decoder_probe import PROBE, record_decoder
from modpass.exporters.facts import specs, weights_dtype
from modpass.exporters.lowering import lower
from modpass.exporters.manifest import DataFile, Manifest, RoutedSpec, manifest_path, versions
from modpass.exporters.origins import note_origins
from modpass.exporters.own_folder import own_folder
from modpass.exporters.precision import to_precision
from modpass.exporters.shared_weights import save_shared
from modpass.exporters.static_graph import prove_static, strip
from modpass.files import sha256, whole_directory
from modpass.model import RoutedModel
from modpass.transform import trace

__all__ = ["DECODE", "PREFILL", "WEIGHTS", "export_decoder"]

PREFILL, DECODE, WEIGHTS = "prefill.onnx", "decode.onnx", "weights.bin"


def export_decoder(
    model: RoutedModel | nn.Module,
    directory: str | os.PathLike[str],
    *,
    batch: int = 1,
    prompt: int = 128,
    max_sequence: int = 1024,
    skipping: Skipping | None = None,
    opset: int = 18,
    dtype: Precision | None = None,
    tokenizer: Any = None,
) -> DecoderManifest:
    """Write a folder from which ``DecoderSession`` generates: two ONNX graphs, one weights file, a manifest.

    Args:
        model: dense, or routed with ``selection="causal"``.
        directory: the folder; an older one is replaced when all is written.
        batch: rows that are generated at once.
        prompt: tokens that the prefill graph reads at once; longer prompts go on token by token.
        max_sequence: tokens that the caches hold, prompt and answer together.
        skipping: how routed blocks are skipped (``decode_step``); by default "conditional" for one row, else "masked".
        opset, dtype: as in ``export_onnx``.
        tokenizer: anything with ``save_pretrained(folder)``, kept beside the graphs in ``tokenizer/``.

    Raises:
        InputError: a size does not fit, or the folder holds something else.
        BlockError: the model cannot be decoded; names the operator.
        ExportError: torch cannot lower it; nothing is written.

    >>> import tempfile
    >>> from modpass.decode.example import tiny_decoder
    >>> export_decoder(tiny_decoder(), tempfile.mkdtemp() + "/d", prompt=4, max_sequence=8).max_sequence
    8
    """
    if dtype not in (None, "float32", "float16", "bfloat16"):
        raise InputError(f"dtype is {dtype!r}; allowed are 'float32', 'float16' and 'bfloat16'")
    own_folder(directory, FILE)
    routed = model if isinstance(model, RoutedModel) else trace(model)
    skipping = skipping or ("conditional" if batch == 1 and routed.routed_blocks else "masked")
    step = decode_step(routed, batch=batch, max_sequence=max_sequence, padding=False, skipping=skipping)
    if len(step.info.tokens) != 1:
        names = ", ".join(t.name for t in step.info.tokens)
        raise InputError(f"a session feeds one token input; this model takes {names}: trace it without the others")
    if (rows := step.info.tokens[0].shape[0]) != batch:
        raise InputError(
            f"a session feeds one row of tokens for each of the batch; input '{step.info.tokens[0].name}' takes "
            f"{rows // batch}, such as codebooks: step it by decode_step instead"
        )
    if step.info.tokens[0].dtype.is_floating_point:
        raise InputError(f"a session feeds token ids; input '{step.info.tokens[0].name}' takes floating-point numbers")
    first = prefill(routed, batch=batch, sequence=prompt, max_sequence=max_sequence, padding=False)
    graphs = {PREFILL: _graph(first, opset, dtype), DECODE: _graph(step, opset, dtype)}
    with whole_directory(directory) as folder:
        save_shared(graphs, folder, WEIGHTS)
        for name, graph in graphs.items():
            _manifest(graph, folder / name, routed, step).save(manifest_path(folder / name))
        if tokenizer is not None:
            tokenizer.save_pretrained(folder / TOKENIZER)
        ids = vocabulary(step, _width(graphs[DECODE], logits_of(step)))
        files = {n: sha256(folder / n) for n in (*graphs, WEIGHTS, *_below(folder, TOKENIZER))}
        found = describe(step, prompt, ids, weights_dtype(graphs[DECODE]), skipping, files)
        record_decoder(first, step, found).save(folder / PROBE)
        found = replace(found, files={**files, PROBE: sha256(folder / PROBE)})
        found.save(folder)
    return found


def _below(folder: Path, part: str) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in Path(folder, part).rglob("*") if p.is_file())


def _graph(model: PrefillModel | StepModel, opset: int, dtype: Precision | None) -> ir.Model:
    """The ONNX graph of one half, under the names of its inputs and outputs."""
    tensors = {i.name: torch.zeros(i.shape, dtype=i.dtype) for i in model.inputs}
    graph = lower(model, tensors, opset, model.output_names)
    note_origins(graph, model)
    strip(graph)
    prove_static(graph)
    return to_precision(graph, dtype) if dtype in ("float16", "bfloat16") else graph


def _width(graph: ir.Model, logits: str) -> int:
    shape = next(v.shape for v in graph.graph.outputs if v.name == logits)
    return int(shape[-1])  # type: ignore[index, arg-type]


def _manifest(graph: ir.Model, path: Path, model: RoutedModel, step: StepModel) -> Manifest:
    blocks = {
        r.block: RoutedSpec(b.capacity, step.info.max_sequence, r.slots, b.gate, b.selection)
        for r in step.routing
        for b in [model.routed_blocks[r.block]]
    }
    plain = Manifest("onnx", path.name, sha256(path), graph.opset_imports[""], weights_dtype(graph))
    return replace(
        plain,
        inputs=specs(graph.graph.inputs),
        outputs=specs(graph.graph.outputs),
        shape={"batch": step.info.batch, "sequence": step.info.max_sequence, "dims": {}},
        routed_blocks=blocks,
        settings=model.settings,
        versions=versions(),
        data=DataFile(WEIGHTS, sha256(path.parent / WEIGHTS)),
    )
