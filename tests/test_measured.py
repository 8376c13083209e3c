"""Islands by measurement: what half precision spoils stays in float32, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

import modpass
from modpass.bench.decode_models import Decoder
from modpass.errors import InputError
from modpass.exporters import FixedShape, export_onnx
from modpass.exporters.manifest import Manifest, manifest_path
from modpass.exporters.measured import measured_islands
from modpass.exporters.onnx_session import open_session
from modpass.exporters.rounded import rounded
from tests.onnx_text import text

SQUARES = "(float[1,4] x) => (float[1,1] y) <int64[1] a = {1}> {s = Mul(x, x) m = ReduceMean(s, a) y = Sqrt(m)}"
ANGLES = "(int64[4] x) => (float[4] y) <float r = {0.9}> {f = Cast<to = 1>(x) a = Mul(f, r) y = Cos(a)}"
PLAIN = "(float[2] x) => (float[2] y) {y = Relu(x)}"


@pytest.mark.parametrize(
    ("body", "values", "needed"),
    [
        (SQUARES, np.full((1, 4), 300.0, np.float32), ("norms",)),  # 300^2 is beyond float16
        (SQUARES, np.full((1, 4), 2.0, np.float32), ()),
        (ANGLES, np.array([4001, 4003, 4095, 5001]), ("tables",)),  # no odd number above 2048 is a float16
        (PLAIN, np.ones(2, np.float32), ()),
    ],
)
def test_a_group_is_kept_where_half_precision_spoils_it(body: str, values: Any, needed: tuple[str, ...]) -> None:
    found = measured_islands(ir.from_onnx_text(text(body)), "float16", {"x": values})
    assert found.needed == needed
    assert str(found).startswith(f"float32 is needed for {', '.join(('router', *needed))} (error ")


def test_rounding_is_that_of_the_type(tmp_path: Path) -> None:
    body = "(float16[3] x, float16[3] w) => (float16[3] y) {s = Add(x, w) y = Mul(s, w)}"
    ir.save(rounded(ir.from_onnx_text(text(body))), tmp_path / "m.onnx")
    x, w = torch.tensor([1.001, 2.002, 300.3]), torch.tensor([0.1, 0.2, 0.3])
    found = open_session(tmp_path / "m.onnx").run(None, {"x": x.numpy(), "w": w.numpy()})[0]
    x, w = x.half(), w.half()
    assert found.tolist() == ((x + w) * w).float().tolist()


def test_an_export_keeps_what_was_measured_and_its_manifest_says_so(tmp_path: Path) -> None:
    torch.manual_seed(0)
    example = (torch.randint(97, (2, 10)),)
    model = modpass.mod_transform(Decoder(2, 32, 2, 97).eval(), 0.25, gate="unit", example_inputs=example)
    manifest = export_onnx(model, tmp_path / "m.onnx", FixedShape(1, 32), dtype="float16", islands="measured")
    assert (manifest.dtype, manifest.islands[0]) == ("float16", "router")
    assert Manifest.load(manifest_path(tmp_path / "m.onnx")).islands == manifest.islands
    graph = ir.load(tmp_path / "m.onnx").graph
    assert graph.initializers["model.blocks.1.router.weight"].dtype == ir.DataType.FLOAT


def test_float32_has_no_islands_and_other_ways_are_refused(tmp_path: Path) -> None:
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)
    routed = modpass.trace(model.eval(), (torch.randn(2, 5, 8),))
    with pytest.raises(
        InputError, match="islands can be measured for dtype 'float16', not for None; leave them to the rule"
    ):
        export_onnx(routed, tmp_path / "m.onnx", FixedShape(1, 16), islands="measured")
    with pytest.raises(InputError, match="for 'float16', not for 'bfloat16'; leave them to the rule"):
        measured_islands(ir.from_onnx_text(text(PLAIN)), "bfloat16", {"x": np.ones(2, np.float32)})
    with pytest.raises(InputError, match="islands is 'none'; allowed are 'rule' and 'measured'"):
        export_onnx(routed, tmp_path / "m.onnx", FixedShape(1, 16), islands="none")  # type: ignore[arg-type]
