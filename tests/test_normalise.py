"""What a trace holds that no exporter takes: complex tables, integers taken from fractions, writes in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import modpass
from modpass.exporters import FixedShape, export_onnx, verify
from tests.test_transform import relative


class ComplexTable(nn.Module):
    """Turns pairs of numbers by a complex buffer, as a vision model's rotary embedding does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.polar(torch.ones(6, 4), torch.rand(6, 4)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * self.table.to(x.device, torch.complex64)[None]
        return torch.view_as_real(turned).flatten(2)


class FromOne(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + (1.0 - mask[..., None]) * -3.0


class Writes(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> Tensor:
        out = torch.zeros_like(x)
        out[:, 1:] = x[:, :-1]
        return out if z is None else out + z


def test_a_complex_table_becomes_a_real_one(tmp_path: Path) -> None:
    model, x = ComplexTable(), torch.randn(2, 6, 8)
    traced = modpass.trace(model, (x,))
    values = [n.meta.get("val") for n in traced.graph.nodes]
    assert not any(isinstance(v, Tensor) and v.is_complex() for v in values)
    assert relative(traced(x), model(x)) < 1e-6
    assert traced.state_dict().keys() == model.state_dict().keys()
    export_onnx(traced, tmp_path / "m.onnx", FixedShape(batch=2))
    verify(traced, tmp_path / "m.onnx").check(1e-5, 1.0)


def test_integers_taken_from_a_fraction_are_exported(tmp_path: Path) -> None:
    model, inputs = FromOne(), {"x": torch.randn(2, 6, 8), "mask": torch.tensor([[1, 1, 1, 1, 0, 0]] * 2)}
    traced = modpass.trace(model, inputs)
    assert torch.equal(traced(**inputs), model(**inputs))
    export_onnx(traced, tmp_path / "m.onnx", FixedShape(batch=2, sequence=6, dims={"x.2": 8}))
    verify(traced, tmp_path / "m.onnx").check(1e-6, 1.0)


@pytest.mark.parametrize("inputs", [{}, {"z": torch.randn(2, 5)}])
def test_a_model_that_writes_in_place_is_traced_however_it_is_called(inputs: dict[str, Tensor]) -> None:
    model, x = Writes(), torch.randn(2, 5)
    traced = modpass.trace(model, {"x": x, **inputs})
    assert not any("_." in str(n.target) for n in traced.graph.nodes)
    assert torch.equal(traced(x, **inputs), model(x, **inputs))
