"""Weights in few bits: as near as the bits allow, run and built as they are, refused above a bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import modpass
from modpass.bench.decode_models import Decoder
from modpass.bench.precision import measure_precisions, table
from modpass.errors import ExportError, InputError, VerificationError
from modpass.exporters import FixedShape, build_engine, export_onnx, verify
from modpass.exporters.conversion import as_onnx
from modpass.exporters.manifest import Manifest, manifest_path
from modpass.exporters.precision import to_precision
from modpass.exporters.quantise import BLOCK, quantise
from modpass.exporters.verify import recorded
from tests.commands import Capture
from tests.commands import run as command
from tests.onnx_text import text

Array = np.ndarray[Any, Any]
KINDS: Any = pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
DECODER = "tests.bench_decoder:decoder"


def product(weight: Array, body: str = "{y = MatMul(x, w)}") -> ir.Model:
    """A graph that multiplies its input by ``weight``."""
    K, N = weight.shape[::-1] if "transB" in body else weight.shape
    model = ir.from_onnx_text(text(f"(float[{K},{K}] x) => (float[{K},{N}] y) {body}", 18))
    w = ir.Value(name="w", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(list(weight.shape)))
    w.const_value = ir.tensor(weight, name="w")
    model.graph.register_initializer(w)
    next(iter(model.graph)).replace_input_with(1, w)
    return model


def dequantised(model: ir.Model) -> Array:
    """What the product of the identity and the weight is, without ONNX Runtime's fusions."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    size = session.get_inputs()[0].shape[0]
    found: Array = session.run(None, {"x": np.eye(size, dtype=np.float32)})[0]
    return found


@KINDS
@settings(max_examples=25, deadline=None)
@given(K=st.integers(1, 70), N=st.integers(1, 5), seed=st.integers(0, 99), scale=st.sampled_from([1e-6, 1.0, 1e4]))
def test_each_weight_is_as_near_as_the_bits_allow(kind: Any, K: int, N: int, seed: int, scale: float) -> None:
    w = (np.random.default_rng(seed).standard_normal((K, N)) * scale).astype(np.float32)
    gap = np.abs(dequantised(quantise(product(w), kind)) - w)
    if kind == "int4":  # steps of an eighth of the largest of its block, one of whose signs ends a step earlier
        largest = np.concatenate(
            [np.broadcast_to(np.abs(b).max(0), b.shape) for b in np.split(w, range(BLOCK, K, BLOCK))]
        )
        assert (gap <= largest / 8 * 1.001).all()
    else:
        largest = np.abs(w).max(0)
        allowed = largest / 127 / 2 if kind == "int8" else np.maximum(np.abs(w) / 16, largest / 448 / 512)
        assert (gap <= allowed * 1.001).all()


@KINDS
def test_a_channel_of_zeros_stays_zero_and_a_gemm_is_turned(kind: Any) -> None:
    w = np.zeros((40, 3), np.float32)
    w[:, 1] = np.linspace(-1, 1, 40)
    made = quantise(product(np.ascontiguousarray(w.T), "{y = Gemm<transB = 1>(x, w)}"), kind)
    found = dequantised(made)
    assert (found[:, [0, 2]] == 0).all()
    assert np.abs(found - w).max() < 0.15


def test_what_is_read_elsewhere_or_named_stays_and_the_original_is_unchanged() -> None:
    w = np.eye(4, dtype=np.float32)
    shared = product(w)
    other = ir.node("Identity", [shared.graph.initializers["w"]])
    other.outputs[0].name, other.outputs[0].type = "z", ir.TensorType(ir.DataType.FLOAT)
    other.outputs[0].shape = ir.Shape([4, 4])
    shared.graph.append(other)
    shared.graph.outputs.append(other.outputs[0])
    with pytest.raises(ExportError, match="no MatMul or Gemm of this model has a weight of its own to quantise"):
        quantise(shared, "int8")
    model = product(w)
    next(iter(model.graph)).metadata_props["namespace"] = ": m/a.router: Linear/node: aten"
    with pytest.raises(ExportError, match="export it as it is"):
        quantise(model, "int8")
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    quantise(model, "int8", keep=())
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_other_bits_are_refused() -> None:
    with pytest.raises(InputError, match="weights are to be 'int2'; allowed are 'int8', 'int4', 'fp8'"):
        quantise(product(np.eye(2, dtype=np.float32)), "int2")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def routed() -> modpass.RoutedModel:
    torch.manual_seed(0)
    example = (torch.randint(97, (2, 10)),)
    return modpass.mod_transform(Decoder(2, 64, 4, 97).eval(), 0.25, gate="unit", example_inputs=example)


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "int8"), ("float16", "int4"), ("bfloat16", "fp8")])
def test_tensorrt_builds_the_graph_in_which_routers_stay_float32(
    routed: modpass.RoutedModel, dtype: Any, kind: Any, tmp_path: Path
) -> None:
    graph, _ = as_onnx(routed, FixedShape(1, 32), dtype=dtype)
    made = quantise(graph, kind)
    kinds = {v.dtype for v in made.graph.initializers.values()}
    assert {"int8": ir.DataType.INT8, "int4": ir.DataType.INT4, "fp8": ir.DataType.FLOAT8E4M3FN}[kind] in kinds
    assert {n.inputs[0].dtype for n in made.graph if n.op_type == "TopK" and n.inputs[0] is not None} == {
        ir.DataType.FLOAT, ir.DataType.INT64,
    }  # fmt: skip
    assert made.graph.initializers["model.blocks.1.router.weight"].dtype == ir.DataType.FLOAT
    ir.save(made, tmp_path / "m.onnx")
    pytest.importorskip("tensorrt_rtx", reason="pip install 'modpass[tensorrt-rtx]'")
    build_engine(tmp_path / "m.onnx", tmp_path / "m.engine", progress=False)


def test_above_the_allowed_error_nothing_is_written_and_an_older_file_stays(
    routed: modpass.RoutedModel, tmp_path: Path
) -> None:
    path, shape = tmp_path / "m.onnx", FixedShape(1, 32)
    manifest = export_onnx(routed, path, shape, weights="int8", max_error=0.9)
    assert (manifest.weights, manifest.max_error, manifest.opset, manifest.precision) == ("int8", 0.9, 21, "int8")
    assert Manifest.load(manifest_path(path)) == manifest
    report = recorded(manifest)
    assert report is not None
    assert 0 < report.outputs[0].max_rel < 0.9
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(VerificationError, match=r"'output' is off by .* allowed is 1e-05 .*nothing is written"):
        export_onnx(routed, path, shape, weights="int4", max_error=1e-5)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert verify(routed, path).check().max_error == 0.9  # the bound that the export was given


@pytest.mark.parametrize("bound", [0, -1.0, "much", True, float("nan")])
def test_a_bound_that_is_no_positive_number_is_refused(routed: modpass.RoutedModel, bound: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it must be a number above 0"):
        export_onnx(routed, tmp_path / "m.onnx", FixedShape(1, 32), max_error=bound)


def test_rows_of_the_table_shrink_and_stay_near(routed: modpass.RoutedModel, tmp_path: Path) -> None:
    rows = measure_precisions(routed, FixedShape(1, 32), tmp_path, rounds=1)
    size = {r.precision: r.size for r in rows}
    assert size["int4"] < size["int8"] < size["float32"]
    exact = rows[0]
    assert (exact.precision, exact.max_error, exact.chosen, exact.likeliest) == ("float32", 0.0, 1.0, 1.0)
    assert all(0 < r.mean_error < 0.5 and r.chosen > 0.3 for r in rows[1:])
    assert table(rows).count("\n") == 6


def test_the_command_line_quantises_and_refuses(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "m.onnx"
    options = ["export", DECODER, path, "--sequence", 16, "--quantise", "int4"]
    _, err = command(capsys, *options, "--max-error", 1e-6, code=1)
    assert "allowed is 1e-06" in err
    assert list(tmp_path.iterdir()) == []
    out, _ = command(capsys, *options, "--max-error", 5)
    assert "weights int4" in out
    assert "within 5 of PyTorch in ONNX Runtime" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["m.onnx", "--max-error", "0"], "0 is not above 0"),
        (["m.onnx", "--max-error", "0.1", "--no-verify"], "leave out --no-verify"),
        (["--buckets", "1x16", "--out", "d", "--quantise", "int8"], "not with --buckets or --triton"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str], message: str, capsys: Capture) -> None:
    _, err = command(capsys, "export", DECODER, *options, code=2)
    assert message in err


def test_half_precision_is_quantised_too(routed: modpass.RoutedModel) -> None:
    graph, _ = as_onnx(routed, FixedShape(1, 32))
    made = quantise(to_precision(graph, "float16"), "int8")
    scales = {n.inputs[1].dtype for n in made.graph if n.op_type == "DequantizeLinear" and n.inputs[1] is not None}
    assert scales == {ir.DataType.FLOAT16}
