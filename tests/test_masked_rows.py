"""What a mask leaves nothing is zero, and the probabilities of attention are read once less."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modpass
from modpass.exporters import FixedShape, export_onnx
from modpass.exporters.masked_rows import zero_rows_late

HEAD = (
    '<ir_version: 8, opset_import: ["": 18]> g (float[2, 3] q, float[3, 3] k, float[2, 3] b, float[3, 4] v)'
    " => (float[2, 4] y)"
)
FORM = "s = MatMul(q, k) m = Add(s, b) p = Softmax(m) n = IsNaN(p) w = Where(n, zero, p) y = MatMul(w, v)"


class Masked(nn.Module):
    """One head of attention under a mask of the caller's, which may leave a row nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x_BSD: Tensor, mask_BSS: Tensor) -> Tensor:
        x = x_BSD[:, None]
        return F.scaled_dot_product_attention(self.proj(x), x, x, attn_mask=mask_BSS[:, None])[:, 0]


class Guarded(nn.Module):
    """Attention written out, with a finite bias and a guard against NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x_BSD: Tensor, mask_BSS: Tensor) -> Tensor:
        bias = torch.where(mask_BSS, 0.0, torch.finfo(torch.float32).min)
        weights = torch.softmax(self.proj(x_BSD) @ x_BSD.mT + bias, -1)
        return torch.where(weights.isnan(), 0.0, weights) @ x_BSD


def run(model: ir.Model, **inputs: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    outputs: list[np.ndarray] = session.run(None, inputs)
    return outputs[0]


def test_rows_that_see_nothing_are_zero_and_the_others_as_in_pytorch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(2, 5, 8), torch.rand(2, 5, 5) > 0.5
    mask[0, 2] = mask[1, 4] = False
    model = Masked().eval()
    export_onnx(modpass.trace(model, (x, mask)), tmp_path / "m.onnx", FixedShape(2, 5))
    graph = ir.load(tmp_path / "m.onnx")
    assert "IsNaN" not in [n.op_type for n in graph.graph]
    found = run(graph, x_BSD=x.numpy(), mask_BSS=mask.numpy())
    assert np.allclose(found, model(x, mask).detach().numpy(), atol=1e-6)
    assert not found[0, 2].any()
    assert not found[1, 4].any()


def test_a_bias_of_the_models_own_keeps_its_least_number(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(2, 5, 8), torch.rand(2, 5, 5) > 0.5
    mask[0, 2] = False
    model = Guarded().eval()
    export_onnx(modpass.trace(model, (x, mask)), tmp_path / "m.onnx", FixedShape(2, 5))
    found = run(ir.load(tmp_path / "m.onnx"), x_BSD=x.numpy(), mask_BSS=mask.numpy())
    assert found[0, 2].any()
    assert np.allclose(found, model(x, mask).detach().numpy(), atol=1e-6)


def test_the_graph_computes_the_same_bits() -> None:
    text = f"{HEAD} <float zero = {{0.0}}> {{{FORM}}}"
    before, after = ir.from_onnx_text(text), ir.from_onnx_text(text)
    assert zero_rows_late(after) == 1
    drawn = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    inputs = {"q": drawn[:2, :3], "k": drawn[2:5, :3], "v": drawn[5:8]}
    bias = np.array([[1, -np.inf, 3], [-np.inf, -np.inf, -np.inf]], np.float32)
    found = run(after, b=bias, **inputs)
    assert np.array_equal(run(before, b=bias, **inputs), found)
    assert found[0].all()
    assert not found[1].any()
    assert after.graph.outputs[0].name == "y"


def test_layers_under_one_mask_share_what_it_says_and_a_fault_stays_visible() -> None:
    first = FORM.replace("y = MatMul(w, v)", "z = MatMul(w, v) u = MatMul(z, t)")
    body = f"{first} m2 = Add(u, b) p2 = Softmax(m2) n2 = IsNaN(p2) w2 = Where(n2, zero, p2) y = MatMul(w2, v)"
    head = HEAD.replace("float[3, 4] v)", "float[3, 4] v, float[4, 3] t)")
    graph = ir.from_onnx_text(f"{head} <float zero = {{0.0}}> {{{body}}}")
    assert zero_rows_late(graph) == 2
    assert [n.op_type for n in graph.graph].count("ReduceMax") == 1
    one = np.ones((4, 4), np.float32)
    q = np.array([[np.nan, 1, 1], [1, 1, 1]], np.float32)
    found = run(graph, q=q, k=one[:3, :3], b=0 * one[:2, :3], v=one[:3], t=one[:, :3])
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()


def test_both_branches_of_a_condition_are_rewritten_under_the_same_names_each_time() -> None:
    one, other = (
        f"{name} () => (float[2, 4] {name}_y) {{{FORM.replace('y =', f'{name}_y =')}}}" for name in ("then", "else")
    )
    head = HEAD.replace("g (", "g (bool c, ").replace("float[2, 4] y)", "float[2, 4] out)")
    text = f"{head} <float zero = {{0.0}}> {{out = If (c) <then_branch = {one}, else_branch = {other}>}}"
    made = [ir.from_onnx_text(text) for _ in range(3)]
    assert [zero_rows_late(graph) for graph in made[1:]] == [2, 2]
    names = [[node.name for node in graph.graph.all_nodes()] for graph in made[1:]]
    assert names[0] == names[1]
    drawn = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    bias = np.array([[1, -np.inf, 3], [-np.inf, -np.inf, -np.inf]], np.float32)
    inputs = {"q": drawn[:2, :3], "k": drawn[2:5, :3], "b": bias, "v": drawn[5:]}
    for c in (True, False):
        before, after = (run(graph, c=np.array(c), **inputs) for graph in made[:2])
        assert np.array_equal(before, after)
        assert not after[1].any()


@pytest.mark.parametrize(
    ("constant", "body"),
    [
        pytest.param("1.0", FORM, id="another number than zero"),
        pytest.param("0.0", FORM.replace("Softmax", "Softmax<axis=0>"), id="a softmax of columns"),
        pytest.param("0.0", FORM.replace("Softmax", "Sqrt"), id="no softmax"),
        pytest.param("0.0", FORM.replace("IsNaN(p)", "IsNaN(s)"), id="NaN of something else"),
        pytest.param("0.0", FORM.replace("Add(s, b)", "Sub(s, b)"), id="no bias"),
        pytest.param("0.0", FORM.replace("Add(s, b)", "Add(b, b)"), id="no scores"),
        pytest.param("0.0", FORM.replace("y = MatMul(w, v)", "z = MatMul(w, v) r = ReduceSum(w) y = Add(z, r)"),
                     id="a second reader"),
        pytest.param("0.0", FORM.replace("y = MatMul(w, v)", "u = Transpose(v) z = MatMul(u, v) y = Add(z, z)"),
                     id="no product of the probabilities"),
    ],
)  # fmt: skip
def test_other_forms_stay(constant: str, body: str) -> None:
    graph = ir.from_onnx_text(f"{HEAD} <float zero = {{{constant}}}> {{{body}}}")
    before = [n.op_type for n in graph.graph]
    assert zero_rows_late(graph) == 0
    assert [n.op_type for n in graph.graph] == before
