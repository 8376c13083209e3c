"""Real weights: equal to dense, equal to the slow reference, equal in ONNX Runtime, built by TensorRT-RTX."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modpass
from modpass.bench.models import load_bundled
from modpass.errors import MissingExtraError
from modpass.exporters import FixedShape, build_engine, export_onnx, verify
from modpass.reference import routed_reference
from tests.test_transform import real, relative, set_blocks, settings_of
from tests.zoo import first

pytestmark = pytest.mark.slow
NAMES = ["smollm2-135m", "minilm-l6", "dinov2-small"]


@cache
def dense(name: str) -> nn.Module:
    try:
        return load_bundled(name)
    except MissingExtraError as e:
        pytest.skip(str(e))


@cache
def routed(name: str) -> modpass.RoutedModel:
    torch.manual_seed(0)
    model = modpass.mod_transform(dense(name), 0.125)
    for block in model.routed_blocks.values():  # untrained scores of a deep trunk's width would let r explode
        block.router.weight.data.mul_(0.1)
    return model


def inputs_of(name: str, B: int, S: int, side: str) -> dict[str, Tensor]:
    if name == "dinov2-small":
        return {"pixel_values": torch.randn(B, 3, 224, 224)}
    mask = torch.ones(B, S, dtype=torch.int64)
    for b in range(1, B):
        pads = slice(0, 7 * b) if side == "left" else slice(S - 7 * b, S)
        mask[b, pads] = 0
    return {"input_ids": torch.randint(100, 20_000, (B, S)), "attention_mask": mask}


@pytest.mark.parametrize("name", NAMES)
def test_unit_gate_at_full_capacity_equals_the_dense_model(name: str) -> None:
    model = modpass.mod_transform(dense(name), 1.0, gate="unit")
    inputs = inputs_of(name, 2, 40, "left")
    with torch.no_grad():
        assert relative(first(model(**inputs)), first(dense(name)(**inputs))) < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("capacity", [0.125, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_routed_model_equals_the_slow_reference(name: str, capacity: float, side: str) -> None:
    model, inputs, chosen = routed(name), inputs_of(name, 3, 40, side), {}
    set_blocks(model, capacity, "linear" if side == "left" else "sigmoid")
    keep = inputs.get("attention_mask")
    with torch.no_grad(), modpass.recorded_choices() as choices:
        found = first(model(**inputs))
    with torch.no_grad(), routed_reference(dense(name), settings_of(model), keep, chosen) as reference:
        wanted = first(reference(**inputs))
    assert {n: c.tolist() for n, c in choices.items()} == chosen
    assert relative(real(found, keep), real(wanted, keep)) < 1e-4


def fixed(name: str) -> FixedShape:
    return FixedShape(1, dims={"pixel_values.2": 224}) if name == "dinov2-small" else FixedShape(1, 128)


@pytest.mark.parametrize("capacity", [0.125, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_onnx_runtime_agrees_in_values_and_every_choice(name: str, capacity: float, tmp_path: Path) -> None:
    model = routed(name)
    # A linear gate of routers that were never trained sends a deep trunk off its ground, where rounding grows.
    set_blocks(model, capacity, "sigmoid")
    export_onnx(model, tmp_path / "m.onnx", fixed(name))
    verify(model, tmp_path / "m.onnx").check(1e-4, 1.0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_tensorrt_rtx_builds_every_precision_for_two_targets(name: str, dtype: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="pip install 'modpass[tensorrt-rtx]'")
    model = routed(name)
    set_blocks(model, 0.125, "linear")
    export_onnx(model, tmp_path / "m.onnx", fixed(name), dtype=dtype)
    for target in ("8.6", "8.9"):
        manifest = build_engine(tmp_path / "m.onnx", tmp_path / "m.engine", compute_capability=target, progress=False)
        assert (manifest.bytes or 0) > 1_000_000
        assert manifest.compute_capabilities == (target,)
        (tmp_path / "m.engine").unlink()
