"""Sessions on a GPU against the CPU: the tokens, and whether a step is one CUDA graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from modpass.exporters import DecoderSession, build_engine, export_decoder
from modpass.exporters.device_backend import DeviceBackend
from modpass.exporters.onnx_device import OnnxRuntimeCudaBackend
from modpass.exporters.tensorrt_backend import TensorRTBackend
from modpass.exporters.trt_api import FLAVORS
from tests.decoders import LENGTH, causal

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 9, 11, 40, 33, 2], [7, 8, 9], [3, 4, 5, 6, 7, 8, 9, 10, 11], [60]]
KINDS = [("masked", 4), ("batch_capacity", 4), ("conditional", 1)]


def exported(skipping: str, batch: int, folder: Path) -> Path:
    model = causal("inner-rotary", 0.5)
    export_decoder(model, folder, batch=batch, prompt=6, max_sequence=LENGTH, skipping=skipping)  # type: ignore[arg-type]
    return folder


def check(folder: Path, backend: DeviceBackend, batch: int, equal: float) -> None:
    """The likeliest tokens where both read the same ones; ``equal`` is the share that must be alike.

    An engine multiplies in TF32, which may turn a close decision.
    """
    plain, session = DecoderSession(folder), DecoderSession(folder, backend)
    for _ in range(2):
        ids, length = np.array([p[:1] * 6 for p in PROMPTS[:batch]]), np.full(batch, 6)
        both = [s.backend.prefill(ids, length).argmax(-1).copy() for s in (plain, session)]
        same = [both[0] == both[1]]
        for t in range(6, LENGTH):
            live = np.arange(batch) < (batch if t < 12 else max(1, batch - 1))
            token, position = both[0], np.full(batch, t)
            both = [s.backend.step(token, position, live).logits.argmax(-1).copy() for s in (plain, session)]
            same.append((both[0] == both[1])[live])
        assert np.concatenate(same).mean() >= equal
    found = session.generate(PROMPTS[:batch], 12)
    assert [len(t) for t in found.tokens] == [12] * batch
    assert session.generate(PROMPTS[:batch], 12).tokens == found.tokens


@pytest.mark.parametrize(("skipping", "batch"), KINDS)
def test_onnx_runtime_on_cuda_generates_what_it_does_on_the_cpu(skipping: str, batch: int, tmp_path: Path) -> None:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("pip install 'modpass[gpu]'")
    check(exported(skipping, batch, tmp_path / "d"), OnnxRuntimeCudaBackend(), batch, 1.0)


@pytest.mark.parametrize("flavor", list(FLAVORS))
@pytest.mark.parametrize(("skipping", "batch"), KINDS)
def test_engines_generate_what_onnx_runtime_does(skipping: str, batch: int, flavor: str, tmp_path: Path) -> None:
    pytest.importorskip(FLAVORS[flavor].module, reason=f"pip install 'modpass[{FLAVORS[flavor].extra}]'")
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    if FLAVORS[flavor].capabilities and capability not in FLAVORS[flavor].capabilities:
        pytest.skip(f"{FLAVORS[flavor].title} has no compute capability {capability}")
    folder = exported(skipping, batch, tmp_path / "d")
    for name in ("prefill", "decode"):
        build_engine(folder / f"{name}.onnx", folder / f"{name}.engine", flavor, capability, progress=False)
    backend = TensorRTBackend(flavor)
    check(folder, backend, batch, 0.9)
    if skipping == "masked":
        assert backend.uncaptured is None
