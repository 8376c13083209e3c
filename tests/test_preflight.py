"""What TensorRT would refuse is refused early and in words; each rule is held against TensorRT-RTX itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir
import pytest

from modpass.errors import BuildError
from modpass.exporters import tensorrt
from modpass.exporters.manifest import Manifest, RoutedSpec, manifest_path
from modpass.exporters.preflight import TOPK_LIMIT, preflight
from modpass.exporters.tensorrt import build_engine
from modpass.files import sha256
from tests.onnx_text import reasons, topk, write

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
