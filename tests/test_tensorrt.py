"""Engines are built, refusals come early and in words, and TensorRT 10 and 11 are both met."""

from __future__ import annotations

import enum
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir
import pytest
import torch

from modpass.errors import BuildError, InputError, MissingExtraError, VerificationError
from modpass.exporters import tensorrt, trt_api, trt_progress
from modpass.exporters.manifest import DataFile, Manifest, RoutedSpec, TensorSpec, manifest_path
from modpass.exporters.precision import to_precision
from modpass.exporters.preflight import TOPK_LIMIT, preflight
from modpass.exporters.tensorrt import build_engine
from modpass.files import sha256

WEIGHTS = ",".join(str(i / 256) for i in range(256))
MLP = f"(float[1,8,16] x) => (float[1,8,16] y) <float[16,16] w = {{{WEIGHTS}}}>" + "{a = MatMul(x, w) y = Relu(a)}"


def text(body: str, opset: int = 18, domains: str = "") -> str:
    return f'<ir_version: 10, opset_import: ["": {opset}{domains}]> g {body}'


def write(path: Path, body: str, opset: int = 18, domains: str = "") -> Path:
    proto = onnx.parser.parse_model(text(body, opset, domains))
    onnx.save(onnx.shape_inference.infer_shapes(proto), str(path))
    return path


def topk(k: int, length: int, scope: str = "layers.3") -> ir.Model:
    """Scores, TopK, and the index sort that follows it, recorded as inside the module ``scope``."""
    body = (
        f"(float[1,{length}] s) => (float[1,{k}] v, int64[1,{k}] i) <int64[1] k = {{{k}}}> "
        "{v, u = TopK(s, k) i, j = TopK<largest = 0>(u, k)}"
    )
    proto = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text(body)))
    model: ir.Model = ir.from_proto(proto)
    for node in model.graph:
        node.metadata_props["pkg.torch.onnx.name_scopes"] = repr(["", scope, "topk"])
    return model


def reasons(body: str, opset: int = 18, domains: str = "", **target: Any) -> str:
    proto = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text(body, opset, domains)))
    return "\n".join(str(r) for r in preflight(ir.from_proto(proto), **target))


# Real builds


@pytest.mark.parametrize("capability", ["8.6", "8.9"])
def test_a_float32_model_builds_and_its_manifest_describes_it(tmp_path: Path, capability: str) -> None:
    path = write(tmp_path / "mlp.onnx", MLP)
    built = build_engine(path, tmp_path / "mlp.engine", compute_capability=capability, progress=False)
    assert Manifest.load(tmp_path / "mlp.engine.json") == built
    built.check(tmp_path / "mlp.engine")
    assert (built.kind, built.flavor, built.compute_capability) == ("engine", "tensorrt-rtx", capability)
    assert built.onnx_sha256 == sha256(path)
    assert built.bytes == (tmp_path / "mlp.engine").stat().st_size
    assert built.inputs == (TensorSpec("x", (1, 8, 16), "float32"),)
    assert built.opset == 18
    assert "tensorrt_rtx" in built.versions
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mlp.engine", "mlp.engine.json", "mlp.onnx"]


@pytest.mark.parametrize("capability", ["8.6", "8.9"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_models_build_and_the_graph_decides(tmp_path: Path, dtype: Any, capability: str) -> None:
    path = write(tmp_path / "mlp.onnx", MLP)
    ir.save(to_precision(ir.load(path), dtype), path)
    built = build_engine(path, tmp_path / "mlp.engine", compute_capability=capability, progress=False)
    assert built.dtype == dtype
    assert built.outputs == (TensorSpec("y", (1, 8, 16), dtype),)


def test_the_target_is_part_of_the_engine(tmp_path: Path) -> None:
    path = write(tmp_path / "mlp.onnx", MLP)
    for capability in ("8.6", "8.9"):
        build_engine(path, tmp_path / capability, compute_capability=capability, progress=False)
    assert b"sm86" in (tmp_path / "8.6").read_bytes()
    assert b"sm89" in (tmp_path / "8.9").read_bytes()
    assert b"sm86" not in (tmp_path / "8.9").read_bytes()


def test_an_exported_torch_module_builds_with_external_data_and_options(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval()
    program = torch.onnx.export(model, (torch.randn(2, 8),), dynamo=True, opset_version=18, verbose=False)
    assert program is not None
    path = tmp_path / "mlp.onnx"
    ir.save(program.model, path, external_data="mlp.onnx.data", size_threshold_bytes=0)
    data = DataFile("mlp.onnx.data", sha256(tmp_path / "mlp.onnx.data"))
    facts = Manifest(
        "onnx", path.name, sha256(path), 18, "float32", data=data, settings={"every": 2},
        routed_blocks={"0": RoutedSpec(0.5, 4, 2, "linear", "expert_choice")},
    )  # fmt: skip
    facts.save(manifest_path(path))
    built = build_engine(path, tmp_path / "mlp.engine", optimization_level=0, workspace_bytes=1 << 26, progress=False)
    assert built.settings == {"every": 2}
    assert built.routed_blocks == facts.routed_blocks
    assert built.data is None
    (tmp_path / "mlp.onnx.data").write_bytes(b"other weights")
    with pytest.raises(VerificationError, match=r"mlp\.onnx\.data' is not the file"):
        build_engine(path, tmp_path / "mlp.engine", progress=False)


def test_a_file_that_is_not_what_its_manifest_says_is_not_built(tmp_path: Path) -> None:
    path = write(tmp_path / "mlp.onnx", MLP)
    Manifest("onnx", path.name, "0" * 64, 18, "float32").save(manifest_path(path))
    with pytest.raises(VerificationError, match="is not the file its manifest was written for"):
        build_engine(path, tmp_path / "mlp.engine", progress=False)
    assert not (tmp_path / "mlp.engine").exists()


def test_a_progress_bar_is_drawn_on_the_error_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    build_engine(write(tmp_path / "mlp.onnx", MLP), tmp_path / "mlp.engine", progress=True)
    drawn = capsys.readouterr()
    assert drawn.out == ""
    assert "Building" in drawn.err


# The limit of TopK


def test_the_limit_of_topk_is_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ir.save(topk(TOPK_LIMIT, 4096), tmp_path / "limit.onnx")
    build_engine(tmp_path / "limit.onnx", tmp_path / "limit.engine", progress=False)
    monkeypatch.setattr(tensorrt, "preflight", lambda *_: [])
    ir.save(topk(TOPK_LIMIT + 1, 4096), tmp_path / "over.onnx")
    with pytest.raises(BuildError, match=r"K exceeds the maximum value allowed \(3840\)"):
        build_engine(tmp_path / "over.onnx", tmp_path / "over.engine", progress=False)
    assert not (tmp_path / "over.engine").exists()


def test_topk_above_the_limit_is_refused_with_block_k_length_limit_and_cure(tmp_path: Path) -> None:
    ir.save(topk(3841, 30_728, "layers.3.pick"), tmp_path / "m.onnx")
    manifest = Manifest(
        "onnx", "m.onnx", sha256(tmp_path / "m.onnx"), 18, "float32",
        routed_blocks={"layers.3": RoutedSpec(0.125, 30_728, 3841, "linear", "expert_choice")},
    )  # fmt: skip
    manifest.save(manifest_path(tmp_path / "m.onnx"))
    with pytest.raises(BuildError) as caught:
        build_engine(tmp_path / "m.onnx", tmp_path / "m.engine", progress=False)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"TensorRT-RTX would refuse '{tmp_path / 'm.onnx'}':"
    assert lines[1] == (
        "  - block 'layers.3': TopK selects k=3841 of S=30728 tokens, TensorRT-RTX's limit is k <= 3840; "
        "give it a capacity of at most 0.1249, or export a shorter sequence"
    )
    assert "TopK sorts k=3841 of S=30728" in lines[2]


def test_the_block_of_a_topk_comes_from_its_indices_or_from_its_module() -> None:
    model = topk(4000, 8000, "a.b")
    assert [r.block for r in preflight(model)] == ["a.b", "a.b"]
    spec = RoutedSpec(0.5, 8000, 4000, "linear", "expert_choice", "i")
    named = Manifest("onnx", "m", "0", 18, "float32", routed_blocks={"blocks.7": spec})
    assert [r.block for r in preflight(model, named)] == ["a.b", "blocks.7"]


def test_topk_at_the_limit_passes_and_nothing_is_changed() -> None:
    model = topk(TOPK_LIMIT, 4096)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert preflight(model) == []
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


# Every other rule: refused by preflight, and refused by TensorRT-RTX itself

SCATTER = "(float[2,4] x, int64[1,4] i, float[1,4] u) => (float[2,4] y) "
SCATTER_ND = "(float[4,4] x, int64[1,1] i, float[1,4] u) => (float[4,4] y) "
QKV = "(%s[1,2,%d,%d] q, %s[1,2,%d,%d] k, %s[1,2,%d,%d] v) => (%s[1,2,%d,%d] y) "


CACHE = "(float16[1,2,8,16] c, float16[1,2,1,16] u) => (float16[1,2,8,16] y)"


def attention(kind: str = "float16", length: int = 4, size: int = 32, attributes: str = "") -> str:
    shape = (kind, length, size)
    return QKV % (shape * 4) + f"{{y = Attention{attributes}(q, k, v)}}"


class Rule(NamedTuple):
    message: str
    body: str
    opset: int = 18
    capability: str = "8.9"


RULES: list[tuple[Any, ...]] = [
    (
        "input has shape .*batch.*, every dim must be an integer",
        '(float["batch", 4] x) => (float["batch", 4] y) {y = Relu(x)}',
    ),
    (
        "k is computed at run time",
        "(float[1,8] s, int64[1] k) => (float[1,n] v, int64[1,n] i) {v, i = TopK(s, k)}",
    ),
    (
        "ScatterElements has reduction 'add'",
        SCATTER + '{y = ScatterElements<reduction = "add">(x, i, u)}',
    ),
    (
        "ScatterND has reduction 'add'",
        SCATTER_ND + '{y = ScatterND<reduction = "add">(x, i, u)}',
    ),
    ("TensorRT-RTX has no NonZero", "(bool[4] x) => (int64[1,n] y) {y = NonZero(x)}"),
    ("has no Compress", "(float[4] x, bool[4] c) => (float[n] y) {y = Compress(x, c)}"),
    ("has no Unique", "(float[4] x) => (float[n] y) {y = Unique(x)}"),
    ("has no BitShift", '(uint8[4] x) => (uint8[4] y) {y = BitShift<direction = "LEFT">(x, x)}'),
    (
        "has no DynamicQuantizeLinear",
        "(float[4] x) => (uint8[4] y, float s, uint8 z) {y, s, z = DynamicQuantizeLinear(x)}",
    ),
    ("has no MatMulInteger", "(int8[4,4] x, int8[4,4] w) => (int32[4,4] y) {y = MatMulInteger(x, w)}"),
    (
        "has no ConvInteger",
        "(uint8[1,1,4,4] x, uint8[1,1,2,2] w) => (int32[1,1,3,3] y) {y = ConvInteger(x, w)}",
    ),
    (
        "has no QLinearMatMul",
        "(int8[4,4] x, float s, int8 z) => (int8[4,4] y) {y = QLinearMatMul(x, s, z, x, s, z, s, z)}",
    ),
    (
        "has no QLinearConv",
        "(int8[1,1,4,4] x, int8[1,1,2,2] w, float s, int8 z) => (int8[1,1,3,3] y) "
        "{y = QLinearConv(x, s, z, w, s, z, s, z)}",
    ),
    ("has no BitCast", "(float[4] x) => (int32[4] y) {y = BitCast<to = 6>(x)}", 26),
    (r"has no com\.microsoft\.FastGelu", "(float16[4] x) => (float16[4] y) {y = com.microsoft.FastGelu(x)}"),
    (
        r"has no com\.microsoft\.DynamicQuantizeMatMul",
        "(float[4,4] x, int8[4,4] w, float[1] s) => (float[4,4] y) {y = com.microsoft.DynamicQuantizeMatMul(x, w, s)}",
    ),
    (
        r"MatMulNBits reads float16 only",
        "(float[4,32] x, uint8[32,1,16] w, float[32] s) => (float[4,32] y) "
        "{y = com.microsoft.MatMulNBits<K = 32, N = 32, bits = 4, block_size = 32>(x, w, s)}",
    ),
    (r"has no plugins, so no mine\.Op", "(float[4] x) => (float[4] y) {y = mine.Op(x)}"),
    ("Attention in float32 has no fused kernel", attention("float"), 23),
    ("Attention has head size 8,", attention(size=8), 23),
    ("Attention has head size 512", attention(size=512), 23),
    (r"Attention has softcap=5\.0", attention(attributes="<softcap = 5.0>"), 23),
    ("Attention has softmax_precision=1", attention(attributes="<softmax_precision = 1>"), 23),
    (
        "Attention's mask is FLOAT, its query FLOAT16",
        (QKV % (("float16", 4, 32) * 4)).replace(" v)", " v, float[4,4] m)") + "{y = Attention(q, k, v, m)}",
        23,
    ),
    (
        "If has a condition of shape",
        "(bool[2] c, float[2] x) => (float[2] y) {y = If (c) <"
        "then_branch = a () => (float[2] p) {p = Relu(x)}, "
        "else_branch = b () => (float[2] q) {q = Sqrt(x)}>}",
    ),
    (
        "must be an input of the network",
        CACHE + ' {r = Relu(c) y = TensorScatter<mode = "linear">(r, u)}',
        24,
    ),
    ("mode 'circular', only 'linear'", CACHE + ' {y = TensorScatter<mode = "circular">(c, u)}', 24),
    (
        r"bfloat16 needs compute capability 8\.0 or later, the target is 7\.5",
        "(bfloat16[4,4] x) => (bfloat16[4,4] y) {y = MatMul(x, x)}",
        18,
        "7.5",
    ),
    ("float32 MatMul does not exist", "(float[4,4] x) => (float[4,4] y) {y = MatMul(x, x)}", 18, "7.5"),
]
DOMAINS = ', "com.microsoft": 1, "mine": 1'


@pytest.mark.parametrize("rule", [Rule(*r) for r in RULES], ids=lambda rule: rule.message)
def test_each_rule_is_found_before_tensorrt_and_tensorrt_does_refuse(
    rule: Rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message, body, opset, capability = rule
    path = write(tmp_path / "m.onnx", body, opset, DOMAINS)
    with pytest.raises(BuildError, match=message) as caught:
        build_engine(path, tmp_path / "m.engine", compute_capability=capability, progress=False)
    assert str(caught.value).startswith("TensorRT-RTX would refuse")
    monkeypatch.setattr(tensorrt, "preflight", lambda *_: [])
    with pytest.raises(BuildError, match=r"TensorRT-RTX 1\.\d\S* could not (parse|build)"):
        build_engine(path, tmp_path / "m.engine", compute_capability=capability, progress=False)


def float8(path: Path, gather: bool) -> Path:
    """Quantise to float8, gather rows of it if asked, dequantise and multiply."""
    nodes = [onnx.helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"])]
    if gather:
        nodes.append(onnx.helper.make_node("Gather", ["q", "i"], ["g"]))
    nodes.append(onnx.helper.make_node("DequantizeLinear", ["g" if gather else "q", "s", "z"], ["d"]))
    nodes.append(onnx.helper.make_node("MatMul", ["d", "d"], ["y"]))
    constants = [
        onnx.helper.make_tensor("s", onnx.TensorProto.FLOAT16, [], [1.0]),
        onnx.helper.make_tensor("z", onnx.TensorProto.FLOAT8E4M3FN, [], [0.0]),
        onnx.helper.make_tensor("i", onnx.TensorProto.INT64, [4], [3, 2, 1, 0]),
    ]
    x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT16, [4, 4]) for n in "xy")
    graph = onnx.helper.make_graph(nodes, "g", [x], [y], constants)
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 19)])
    onnx.save(onnx.shape_inference.infer_shapes(model), str(path))
    return path


@pytest.mark.parametrize(
    ("gather", "capability", "message"),
    [
        (False, "8.6", r"float8 needs compute capability 8\.9 or later, the target is 8\.6"),
        (True, "8.9", "Gather cannot read float8; quantise after it"),
    ],
)
def test_float8_is_refused_before_ada_and_in_gathers(
    gather: bool, capability: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = float8(tmp_path / "m.onnx", gather)
    with pytest.raises(BuildError, match=message):
        build_engine(path, tmp_path / "m.engine", compute_capability=capability, progress=False)
    monkeypatch.setattr(tensorrt, "preflight", lambda *_: [])
    with pytest.raises(BuildError, match="could not build"):
        build_engine(path, tmp_path / "m.engine", compute_capability=capability, progress=False)


def test_float8_products_build_for_ada(tmp_path: Path) -> None:
    assert build_engine(float8(tmp_path / "m.onnx", False), tmp_path / "m.engine", progress=False).opset == 19


def test_float64_inputs_and_outputs_are_refused_though_tensorrt_takes_them() -> None:
    found = reasons("(double[2] x) => (double[2] y) {y = Neg(x)}")
    assert found.count("float64, which TensorRT would silently turn into float32") == 2


def test_all_refusals_are_listed_at_once() -> None:
    body = "(double[2] x, bool[4] c) => (double[2] y, int64[1,n] z) {y = Neg(x) z = NonZero(c)}"
    assert len(reasons(body).splitlines()) == 4


def test_what_full_tensorrt_can_do_is_not_refused_there() -> None:
    scatter = SCATTER + '{y = ScatterElements<reduction = "add">(x, i, u)}'
    assert reasons(scatter, flavor="tensorrt") == ""
    assert "reduction 'add'" in reasons(SCATTER_ND + '{y = ScatterND<reduction = "add">(x, i, u)}', flavor="tensorrt")
    assert (
        reasons("(float[4,4] x) => (float[4,4] y) {y = MatMul(x, x)}", flavor="tensorrt", compute_capability="7.5")
        == ""
    )
    assert reasons("(float[4] x) => (float[4] y) {y = mine.Op(x)}", domains=DOMAINS, flavor="tensorrt") == ""


def test_a_function_of_the_model_is_not_a_custom_operator() -> None:
    model = (
        '<ir_version: 10, opset_import: ["": 18, "mine": 1]> g (float[4] x) => (float[4] y) {y = mine.Op(x)}'
        '<domain: "mine", opset_import: ["": 18]> Op (a) => (b) {b = Relu(a)}'
    )
    assert preflight(ir.from_onnx_text(model)) == []


@pytest.mark.parametrize("size", [12, 64, 256])
def test_float16_attention_of_a_supported_head_size_builds(size: int, tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", attention(size=size), 23)
    assert build_engine(path, tmp_path / "m.engine", progress=False).opset == 23


def test_attention_inside_if_is_refused() -> None:
    inner = "(float16[1,2,4,32] p) {p = Attention(q, k, v)}, else_branch = b () => (float16[1,2,4,32] r) {r = Relu(q)}"
    head = (QKV % (("float16", 4, 32) * 4)).replace("(float16[1,2,4,32] q", "(bool c, float16[1,2,4,32] q", 1)
    body = f"{head}{{y = If (c) <then_branch = a () => {inner}>}}"
    assert "Attention cannot be inside If" in reasons(body, 23)


# Arguments


@pytest.mark.parametrize("capability", ["sm_89", "8", "8.9.1", "", "89"])
def test_a_malformed_compute_capability_is_refused(tmp_path: Path, capability: str) -> None:
    path = write(tmp_path / "mlp.onnx", MLP)
    with pytest.raises(InputError, match=r"compute_capability is '.*', it must look like '8\.9'"):
        build_engine(path, tmp_path / "e", compute_capability=capability)


@pytest.mark.parametrize(("flavor", "capability", "message"), [
    ("tensorrt-rtx", "9.0", r"builds for 7\.5, 8\.0, 8\.6, 8\.9, 12\.0, 12\.1, not for 9\.0"),
    ("tensorrt", "7.0", r"TensorRT needs compute capability 7\.5 or later, not 7\.0"),
])  # fmt: skip
def test_a_gpu_the_flavour_does_not_know_is_refused(tmp_path: Path, flavor: str, capability: str, message: str) -> None:
    path = write(tmp_path / "mlp.onnx", MLP)
    with pytest.raises(BuildError, match=message):
        build_engine(path, tmp_path / "e", flavor, capability)


def test_the_known_compute_capabilities_are_those_of_the_installed_module() -> None:
    module = trt_api.load("tensorrt-rtx").module
    names = {n for n in module.ComputeCapability.__members__ if n.startswith("SM")}
    assert {"SM" + c.replace(".", "") for c in trt_api.FLAVORS["tensorrt-rtx"].capabilities} == names


@pytest.mark.parametrize(("options", "message"), [
    ({"flavor": "trt"}, "flavor is 'trt', allowed are: tensorrt-rtx, tensorrt"),
    ({"optimization_level": 6}, "optimization_level is 6, allowed are 0 to 5"),
    ({"workspace_bytes": 0}, "workspace_bytes is 0, it must be a positive number"),
    ({"timing_cache": "t.cache"}, "timing_cache has no effect in TensorRT-RTX"),
])  # fmt: skip
def test_a_flag_out_of_range_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_engine(write(tmp_path / "mlp.onnx", MLP), tmp_path / "e", **options)


def test_a_missing_and_a_broken_onnx_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no ONNX file"):
        build_engine(tmp_path / "absent.onnx", tmp_path / "e")
    (tmp_path / "broken.onnx").write_bytes(b"not a protobuf")
    with pytest.raises(InputError, match="cannot be read as an ONNX model"):
        build_engine(tmp_path / "broken.onnx", tmp_path / "e")


def test_a_missing_package_names_the_extra_and_refusals_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'modpass\[tensorrt\]'"):
        build_engine(write(tmp_path / "mlp.onnx", MLP), tmp_path / "e", "tensorrt")
    ir.save(topk(4000, 8000), tmp_path / "k.onnx")
    with pytest.raises(BuildError, match="k=4000 of S=8000"):
        build_engine(tmp_path / "k.onnx", tmp_path / "e", "tensorrt")


# Errors


def test_a_failure_names_the_torch_module_of_the_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "preflight", lambda *_: [])
    model = topk(4000, 8000, "layers.3")
    next(iter(model.graph)).name = "node_topk__1"
    ir.save(model, tmp_path / "m.onnx")
    with pytest.raises(BuildError) as caught:
        build_engine(tmp_path / "m.onnx", tmp_path / "e", compute_capability="8.6", progress=False)
    message = str(caught.value)
    assert message.startswith("TensorRT-RTX 1.")
    assert f"could not build '{tmp_path / 'm.onnx'}' for compute capability 8.6" in message
    assert "(at node 'node_topk__1' of module 'layers.3')" in message
    assert "K exceeds the maximum" in message


def test_a_parser_error_names_the_operator_and_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "preflight", lambda *_: [])
    model = ir.from_proto(onnx.parser.parse_model(text("(bool[4] x) => (int64[1,n] y) {y = NonZero(x)}")))
    node = next(iter(model.graph))
    node.name, node.metadata_props["namespace"] = "node_pick", ": M/layers.1: Block/nonzero: aten.nonzero"
    ir.save(model, tmp_path / "m.onnx")
    with pytest.raises(BuildError, match=r"could not parse .* \(at node 'node_pick' of module 'layers\.1'\): NonZero"):
        build_engine(tmp_path / "m.onnx", tmp_path / "e", progress=False)


def test_messages_of_an_earlier_build_do_not_leak_into_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tensorrt, "preflight", lambda *_: [])
        ir.save(topk(4000, 8000), tmp_path / "m.onnx")
        with pytest.raises(BuildError, match="K exceeds"):
            build_engine(tmp_path / "m.onnx", tmp_path / "e", progress=False)
    build_engine(write(tmp_path / "mlp.onnx", MLP), tmp_path / "e", progress=False)
    assert trt_api.load("tensorrt-rtx").log.first_error() is None


# Cancelling


def test_ctrl_c_cancels_a_real_build_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "mlp.onnx", MLP)
    make, once, answers = trt_progress._monitor, threading.Lock(), []
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # test runners may ignore it

    def interrupting(module: Any, bar: Any, cancelled: threading.Event) -> Any:
        monitor = make(module, bar, cancelled)
        step = monitor.step_complete

        def interrupted(_: Any, phase_name: str, number: int) -> bool:
            if once.acquire(blocking=False):  # TensorRT calls from several threads
                signal.raise_signal(signal.SIGINT)
                assert cancelled.wait(120)  # until the main thread has caught it
            answers.append(step(phase_name, number))
            return bool(answers[-1])

        type(monitor).step_complete = interrupted
        return monitor

    monkeypatch.setattr(trt_progress, "_monitor", interrupting)
    try:
        with pytest.raises(KeyboardInterrupt):
            build_engine(path, tmp_path / "mlp.engine", progress=False)
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert False in answers
    assert any("cancel" in m.lower() for _, m in trt_api.load("tensorrt-rtx").log.messages)
    assert [p.name for p in tmp_path.iterdir()] == ["mlp.onnx"]
    monkeypatch.setattr(trt_progress, "_monitor", make)
    build_engine(path, tmp_path / "mlp.engine", progress=False)


# TensorRT 10 and 11, which need a GPU: modules of the same layout that record what they are asked for


def flags(name: str, **values: int) -> Any:
    return enum.IntEnum(name, values)


class FakeBuilder:
    """As in both majors: null pointers become None, nothing raises."""

    def __init__(self, module: Any, logger: Any) -> None:
        self.module, self.logger = module, logger

    def create_network(self, flags: int) -> Any:
        self.module.asked["network"] = flags
        return None if "network" in self.module.broken else SimpleNamespace()

    def create_builder_config(self) -> Any:
        if "config" in self.module.broken:
            return None
        asked, broken = self.module.asked, self.module.broken

        def limit(pool: Any, size: int) -> None:
            asked["workspace"] = (pool.name, size)

        def make_cache(content: bytes) -> Any:
            asked["cache in"] = content
            return None if "cache" in broken else SimpleNamespace(serialize=lambda: b"timings")

        self.config = SimpleNamespace(
            set_memory_pool_limit=limit, create_timing_cache=make_cache,
            set_timing_cache=lambda cache, ignore_mismatch: "mismatch" not in broken,
        )  # fmt: skip
        return self.config

    def build_serialized_network(self, network: Any, config: Any) -> Any:
        self.module.asked["config"] = config
        monitor = config.progress_monitor
        monitor.phase_start("Building engine", None, 2)
        going = [monitor.step_complete("Building engine", i) for i in range(2)]
        monitor.phase_finish("Building engine")
        if "build" in self.module.broken:
            self.logger.log(self.module.Severity.ERROR, "Error Code 10: no implementation for node_y")
        return b"engine" if all(going) and "build" not in self.module.broken else None


def fake(version: str, broken: frozenset[str]) -> Any:
    """A module ``tensorrt`` with the enum layout of a major version."""
    module: Any = ModuleType("tensorrt")
    old = version.startswith("10")
    module.__version__, module.asked, module.broken = version, {}, broken
    module.ILogger = type("ILogger", (), {})
    module.IProgressMonitor = type("IProgressMonitor", (), {})
    module.Severity = flags("Severity", INTERNAL_ERROR=0, ERROR=1, WARNING=2)
    module.MemoryPoolType = flags("MemoryPoolType", WORKSPACE=0)
    creation = {"EXPLICIT_BATCH": 0, "STRONGLY_TYPED": 1, "PREFER_JIT": 2} if old else {"STRONGLY_TYPED": 0}
    module.NetworkDefinitionCreationFlag = flags("NetworkDefinitionCreationFlag", **creation)

    def builder(logger: Any) -> Any:
        if "builder" in broken:
            raise TypeError("pybind11::init(): factory function returned nullptr")
        return FakeBuilder(module, logger)

    error = SimpleNamespace(desc=lambda: "UNSUPPORTED_NODE in node_y", node_name=lambda: "", node_operator=lambda: "")
    parser = SimpleNamespace(
        parse_from_file=lambda path: module.asked.update(path=path) or "parse" not in broken,
        num_errors=1, get_error=lambda i: error,
    )  # fmt: skip
    module.Builder, module.OnnxParser = builder, lambda network, logger: parser
    return module


Install = Callable[..., Any]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a fake TensorRT and a GPU of compute capability 9.0 in place."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(trt_api, "_LOGGERS", {})

    def put(version: str, *broken: str) -> Any:
        module = fake(version, frozenset(broken))
        monkeypatch.setitem(sys.modules, "tensorrt", module)
        return module

    return put  # type: ignore[return-value]


@pytest.mark.parametrize(("version", "bits"), [("10.16.1", 0b10), ("11.4.0", 0b01)])
def test_full_tensorrt_gets_the_strongly_typed_bit_of_its_own_version(
    version: str, bits: int, install: Install, tmp_path: Path
) -> None:
    module = install(version)
    path = write(tmp_path / "mlp.onnx", MLP)
    cache = tmp_path / "timings"
    built = build_engine(
        path, tmp_path / "mlp.engine", "tensorrt", "9.0", optimization_level=3, workspace_bytes=1024,
        timing_cache=cache, progress=False,
    )  # fmt: skip
    assert module.asked["network"] == bits
    assert module.asked["workspace"] == ("WORKSPACE", 1024)
    assert module.asked["config"].builder_optimization_level == 3
    assert not hasattr(module.asked["config"], "num_compute_capabilities")
    assert module.asked["path"] == str(path.resolve())
    assert (module.asked["cache in"], cache.read_bytes()) == (b"", b"timings")
    assert built.versions["tensorrt"] == version
    assert (tmp_path / "mlp.engine").read_bytes() == b"engine"
    build_engine(path, tmp_path / "mlp.engine", "tensorrt", "9.0", timing_cache=cache, progress=False)
    assert module.asked["cache in"] == b"timings"


def test_a_later_version_without_the_flag_gets_no_flag(install: Install, tmp_path: Path) -> None:
    module = install("12.0.0")
    module.NetworkDefinitionCreationFlag = flags("NetworkDefinitionCreationFlag", PREFER_AOT=2)
    build_engine(write(tmp_path / "m.onnx", MLP), tmp_path / "e", "tensorrt", "9.0", progress=False)
    assert module.asked["network"] == 0


@pytest.mark.parametrize(("broken", "message"), [
    ("builder", r"TensorRT 10\.9 made no builder: it gave no reason; full TensorRT needs an NVIDIA GPU"),
    ("network", "made no network"),
    ("config", "made no builder configuration"),
    ("cache", "made no timing cache"),
    ("mismatch", "made no timing cache for this GPU and version"),
    ("parse", "could not parse .*: UNSUPPORTED_NODE in node_y"),
    ("build", "could not build .* for compute capability 9.0: Error Code 10: no implementation for node_y"),
])  # fmt: skip
def test_each_place_where_tensorrt_gives_none_becomes_our_error(
    broken: str, message: str, install: Install, tmp_path: Path
) -> None:
    install("10.9", broken)
    with pytest.raises(BuildError, match=message):
        build_engine(
            write(tmp_path / "m.onnx", MLP), tmp_path / "e", "tensorrt", "9.0", timing_cache=tmp_path / "t",
            progress=False,
        )  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_full_tensorrt_builds_for_the_present_gpu_only(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("11.4.0")
    path = write(tmp_path / "m.onnx", MLP)
    with pytest.raises(BuildError, match=r"only for the GPU of this machine, which has compute capability 9\.0"):
        build_engine(path, tmp_path / "e", "tensorrt", "8.9", progress=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BuildError, match=r"which cannot be found \(PyTorch sees none\)"):
        build_engine(path, tmp_path / "e", "tensorrt", "8.9", progress=False)


def test_one_logger_serves_all_builds_of_a_process(install: Install) -> None:
    install("11.4.0")
    assert trt_api.load("tensorrt").logger is trt_api.load("tensorrt").logger


def test_the_target_of_rtx_is_set_by_name_and_an_unknown_one_is_named() -> None:
    api = trt_api.load("tensorrt-rtx")
    config = api.config(api.builder())
    api.target(config, "12.0")
    assert config.get_compute_capability(0) == api.module.ComputeCapability.SM120
    with pytest.raises(BuildError, match=r"has no compute capability 9\.0; it has SM120, SM121, SM75"):
        api.target(config, "9.0")
