"""What a decoder's prompt and first step gave in PyTorch when it was exported, and the same from its files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from modpass.decode import PrefillModel, StepModel
from modpass.exporters.backend import OnnxRuntimeBackend
from modpass.exporters.decoder_manifest import DecoderManifest
from modpass.exporters.draws import Draw, drawn
from modpass.exporters.probe import Probe, sampled, scale_of
from modpass.exporters.verify import Difference, VerificationReport, difference

__all__ = ["PROBE", "record_decoder", "run_decoder_probe"]

PROBE = "probe.safetensors"
_SEED = 0
_PROMPT, _TOKENS = "prompt", "tokens"
_NAMES = ("prefill logits", "decode logits")


def record_decoder(first: PrefillModel, step: StepModel, manifest: DecoderManifest) -> Probe:
    """Run prompts of a seed and one step in PyTorch; keep some of the logits."""
    how = (
        Draw(_PROMPT, (manifest.batch, manifest.prompt), 0, manifest.vocabulary - 1),
        Draw(_TOKENS, (manifest.batch, 1), 0, manifest.vocabulary - 1),
    )
    given = {n: torch.from_numpy(a) for n, a in drawn(how, _SEED).items()}
    length = torch.from_numpy(_length(manifest))
    with torch.no_grad():
        outputs, state = first.fill({manifest.tokens: given[_PROMPT], "length": length})
        second = step.advance({manifest.tokens: given[_TOKENS]}, length, state)
    logits = [outputs[manifest.logits].float().numpy(), second[manifest.logits].float().numpy()]
    found = {n: a[:, -1, : manifest.vocabulary] for n, a in zip(_NAMES, logits, strict=True)}
    return Probe(
        _SEED, how, {n: a.shape for n, a in found.items()}, {n: sampled(a) for n, a in found.items()},
        {n: scale_of(a) for n, a in found.items()}, {},
    )  # fmt: skip


def run_decoder_probe(folder: str | os.PathLike[str], manifest: DecoderManifest) -> VerificationReport:
    """The same from the files of a folder, in ONNX Runtime on the CPU.

    Raises:
        ModpassError: ONNX Runtime refuses a graph, or the probe cannot be read.
    """
    probe = Probe.load(Path(folder, PROBE))
    given = drawn(probe.inputs, probe.seed)
    backend, length = OnnxRuntimeBackend(), _length(manifest)
    backend.open(Path(folder), manifest)
    first = backend.prefill(given[_PROMPT], length)[:, : manifest.vocabulary].copy()
    second = backend.compute(given[_TOKENS][:, 0], length, np.ones(manifest.batch, np.bool_))
    found = dict(zip(_NAMES, (first, second[:, : manifest.vocabulary]), strict=True))
    outputs: tuple[Difference, ...] = tuple(
        difference(n, a, sampled(found[n]), probe.scales[n]) for n, a in probe.outputs.items()
    )
    return VerificationReport(outputs, {}, manifest.dtype)


def _length(manifest: DecoderManifest) -> np.ndarray:
    """The prompts are whole where a token fits behind them."""
    return np.full(manifest.batch, min(manifest.prompt, manifest.max_sequence - 1), np.int64)
