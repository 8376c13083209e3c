"""Half precision: the right nodes stay float32, the graph stays legal, and it computes nearly the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from modpass.errors import ExportError, InputError
from modpass.exporters.islands import find_islands, module_scopes
from modpass.exporters.precision import to_precision
from modpass.exporters.tensorrt import build_engine

HALVES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
D, HEADS, TOKENS, K = 32, 4, 24, 6


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D) + 0.1 * torch.randn(D))

    def forward(self, x_BSD: Tensor) -> Tensor:
        normed: Tensor = self.weight * (x_BSD * torch.rsqrt(x_BSD.pow(2).mean(-1, keepdim=True) + 2e-8))
        return normed


class Block(nn.Module):
    """Pre-norm attention with rotary positions, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(), RMSNorm()
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(b, s, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        q, k = (t * cos[:, None] + _turned(t) * sin[:, None] for t in (q, k))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, D))
        out: Tensor = x + self.down(nn.functional.silu(self.up(self.mlp_norm(x))))
        return out


def _turned(t: Tensor) -> Tensor:
    left, right = t.chunk(2, -1)
    return torch.cat([-right, left], -1)


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D) / D**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * self.weight.float()).sum(-1)


class Routed(nn.Module):
    """Expert choice: the block runs on the K tokens of highest score."""

    def __init__(self, scorer: str) -> None:
        super().__init__()
        self.name, self.body = scorer, Block()
        self.add_module(scorer, Scorer())

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        scores = getattr(self, self.name)(x)
        chosen = torch.topk(scores, K, dim=1).indices.sort(dim=1).values
        b = torch.arange(x.shape[0])[:, None]
        rows, square = (b, chosen), (b[:, :, None], 0, chosen[:, :, None], chosen[:, None, :])
        picked = x[rows]
        update = self.body(picked, cos[rows], sin[rows], mask[square][:, None]) - picked
        return x.index_put(rows, picked + scores.gather(1, chosen)[..., None].to(x.dtype) * update)


class Decoder(nn.Module):
    frequencies: Tensor

    def __init__(self, scorer: str = "router") -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, D)
        self.layers = nn.ModuleList([Block(), Routed(scorer), Block()])
        self.norm, self.head = RMSNorm(), nn.Linear(D, 64, bias=False)
        self.register_buffer("frequencies", 500_000.0 ** -(torch.arange(0, D // HEADS, 2) / (D // HEADS)))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        angle = position_ids[:, :, None].float() @ self.frequencies[None, None, :]
        angle = torch.cat([angle, angle], -1)
        lowest = torch.finfo(x.dtype).min
        seen = torch.full((TOKENS, TOKENS), lowest).triu(1)[None, None]
        mask = seen + (1.0 - attention_mask[:, None, None, :].float()) * lowest
        for layer in self.layers:
            x = layer(x, angle.cos(), angle.sin(), mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Encoder(nn.Module):
    """Patches, LayerNorm blocks with GELU, and a mean over the tokens: a small vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, D, 4, 4)
        self.positions = nn.Parameter(torch.randn(1, 16, D))
        self.layer = nn.TransformerEncoderLayer(D, HEADS, 64, activation="gelu", batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.norm(self.layer(x)).mean(1))
        return logits


def exported(model: nn.Module, inputs: dict[str, Tensor]) -> ir.Model:
    torch.manual_seed(0)
    program = torch.onnx.export(model.eval(), (), kwargs=inputs, dynamo=True, opset_version=18, verbose=False)
    assert program is not None
    return program.model


def decoder_inputs() -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[:, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(5000, 5000 + TOKENS)[None]}


def encoder_inputs() -> dict[str, Tensor]:
    return {"pixels": torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))}


@pytest.fixture(scope="module")
def decoder() -> ir.Model:
    torch.manual_seed(0)
    return exported(Decoder(), decoder_inputs())


@pytest.fixture(scope="module")
def encoder() -> ir.Model:
    torch.manual_seed(0)
    return exported(Encoder(), encoder_inputs())


def run(model: ir.Model, inputs: dict[str, Tensor], outputs: list[str] | None = None) -> list[np.ndarray[Any, Any]]:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    types = {i.name: i.type for i in session.get_inputs()}
    feed = {n: t.numpy().astype(np.float16) if "16" in types[n] else t.numpy() for n, t in inputs.items()}
    results: list[np.ndarray[Any, Any]] = session.run(outputs, feed)
    return results


def from_text(body: str, opset: int = 18) -> ir.Model:
    return ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": {opset}]> g {body}')


def ops(model: ir.Model) -> list[str]:
    return [n.op_type for n in model.graph.all_nodes()]


def node(model: ir.Model, op: str) -> ir.Node:
    return next(n for n in model.graph.all_nodes() if n.op_type == op)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", ["decoder", "encoder"])
def test_the_result_is_legal_onnx_and_builds_in_tensorrt(
    name: str, half: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = to_precision(request.getfixturevalue(name), half)
    path = tmp_path / "model.onnx"
    ir.save(model, path)
    onnx.checker.check_model(str(path), full_check=True)
    assert all(v.dtype != ir.DataType.FLOAT for v in (*model.graph.inputs, *model.graph.outputs))
    built = build_engine(path, tmp_path / "model.engine", progress=False)
    assert built.dtype == half
    assert built.outputs[0].dtype == half


def test_a_float16_decoder_computes_nearly_what_the_float32_one_does(decoder: ir.Model) -> None:
    full, half = run(decoder, decoder_inputs())[0], run(to_precision(decoder, "float16"), decoder_inputs())[0]
    assert half.dtype == np.float16
    # float16 keeps 11 bits; ten roundings in a row leave about 1e-2 of the largest logit at worst
    assert np.abs(full - half).max() < 5e-3 * np.abs(full).max()


def test_a_float16_encoder_computes_nearly_what_the_float32_one_does(encoder: ir.Model) -> None:
    full, half = run(encoder, encoder_inputs())[0], run(to_precision(encoder, "float16"), encoder_inputs())[0]
    assert np.abs(full - half).max() < 5e-3 * np.abs(full).max()


@pytest.mark.parametrize("half", HALVES)
def test_the_input_model_is_not_changed_and_weights_are_not_copied(decoder: ir.Model, half: Any) -> None:
    before = ir.to_proto(decoder).SerializeToString(deterministic=True)
    made = to_precision(decoder, half)
    assert ir.to_proto(decoder).SerializeToString(deterministic=True) == before
    weights = [v.const_value for v in made.graph.initializers.values() if v.dtype == HALVES[half]]
    assert weights
    assert all(isinstance(w, ir.LazyTensor) for w in weights)


@pytest.mark.parametrize("scorer", ["router", "scorer"])
@pytest.mark.parametrize("half", HALVES)
def test_scores_and_topk_stay_float32_by_module_name_and_by_shape_of_the_graph(scorer: str, half: Any) -> None:
    torch.manual_seed(0)
    made = to_precision(exported(Decoder(scorer), decoder_inputs()), half)
    scores = node(made, "TopK").inputs[0]
    assert scores is not None
    assert scores.dtype == ir.DataType.FLOAT
    total = scores.producer()
    assert total is not None
    product = total.inputs[0].producer()  # type: ignore[union-attr]
    assert product is not None
    assert [v.dtype for v in product.inputs if v is not None] == [ir.DataType.FLOAT] * 2
    assert made.graph.initializers[f"layers.1.{scorer}.weight"].dtype == ir.DataType.FLOAT


def test_the_same_tokens_are_chosen_when_the_stream_is_the_same(decoder: ir.Model) -> None:
    half = to_precision(decoder, "float16")
    for model in (full := decoder.clone(), half):
        model.graph.outputs.append([n for n in model.graph if n.op_type == "TopK"][1].outputs[0])
    assert (run(full, decoder_inputs())[1] == run(half, decoder_inputs())[1]).all()


@pytest.mark.parametrize("half", HALVES)
def test_norm_statistics_stay_float32_and_eps_does_not_underflow(decoder: ir.Model, half: Any) -> None:
    made = to_precision(decoder, half)
    for n in made.graph:
        if n.op_type in ("Pow", "ReduceMean", "Sqrt", "Reciprocal", "Cos", "Sin"):
            assert n.outputs[0].dtype == ir.DataType.FLOAT, n.name
    roots = [n.inputs[0].producer() for n in made.graph if n.op_type == "Sqrt" and n.inputs[0] is not None]
    constants = [v.const_value for r in roots if r for v in r.inputs if v and v.const_value is not None]
    eps = {c.numpy().item() for c in constants}
    assert eps == {float(np.float32(2e-8))}


def test_float16_statistics_survive_a_stream_whose_square_overflows() -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)

    inputs = {"x": torch.full((1, 4, 8), 500.0)}
    model = exported(Norm(), inputs)
    assert np.allclose(run(to_precision(model, "float16"), inputs)[0], 1.0, atol=2e-3)


def test_positions_beyond_2048_keep_their_rotary_angles(decoder: ir.Model) -> None:
    half = to_precision(decoder, "bfloat16")
    angle = node(half, "Cos").inputs[0]
    assert angle is not None
    assert angle.dtype == ir.DataType.FLOAT
    upstream, pending = set(), [angle]
    while pending:
        producer = pending.pop().producer()
        if producer is not None:
            upstream.add(producer.op_type)
            pending += [v for v in producer.inputs if v is not None]
    assert "MatMul" in upstream


@pytest.mark.parametrize("half", HALVES)
def test_no_cast_follows_a_cast_and_none_is_made_twice(decoder: ir.Model, half: Any) -> None:
    made = to_precision(decoder, half)
    casts = [n for n in made.graph if n.op_type == "Cast"]
    sources = [n.inputs[0].producer() for n in casts if n.inputs[0] is not None]
    assert not [s for s in sources if s is not None and s.op_type == "Cast"]
    keys = Counter((n.inputs[0], n.attributes.get_int("to")) for n in casts)
    assert set(keys.values()) == {1}
    assert all(n.inputs[0].dtype != n.outputs[0].dtype for n in casts if n.inputs[0] is not None)


@pytest.mark.parametrize("half", HALVES)
def test_masks_become_the_finite_minimum_and_infinities_stay(half: Any) -> None:
    model = from_text(
        "(float[2] x, bool[2] seen) => (float[2] y) <float[2] low = {-1e38, 0}> {y = Where(seen, x, low)}"
    )
    low = model.graph.initializers["low"]
    low.const_value = ir.tensor(np.array([np.finfo(np.float32).min, -np.inf], np.float32), name="low")
    made = to_precision(model, half).graph.initializers["low"].const_value
    assert made is not None
    lowest = {"float16": -65504.0, "bfloat16": -3.3895313892515355e38}[half]
    assert made.numpy().astype(np.float64).tolist() == [lowest, -np.inf]


def test_a_mask_computed_in_float32_is_clipped_before_its_cast(decoder: ir.Model) -> None:
    made = to_precision(decoder, "float16")
    clip = node(made, "Clip")
    assert [r.op_type for r in clip.outputs[0].consumers()] == ["Cast"]
    padded = decoder_inputs()
    padded["attention_mask"][:, :] = 0
    assert np.isfinite(run(made, padded)[0]).all()


def test_constants_of_islands_keep_their_name_and_others_change_in_place(decoder: ir.Model) -> None:
    made = to_precision(decoder, "bfloat16")
    names = set(made.graph.initializers)
    assert {"embedding.weight", "layers.0.attention_norm.weight", "layers.1.router.weight"} <= names
    assert made.graph.initializers["embedding.weight"].dtype == ir.DataType.BFLOAT16
    assert names <= set(decoder.graph.initializers) | {"bfloat16_min", "bfloat16_max"} | {
        n for n in names if n.endswith("_bfloat16")
    }


def test_a_constant_read_by_an_island_and_by_the_stream_exists_twice() -> None:
    body = "<float c = {2.0}> {a = Relu(x) m = Mul(a, c) p = Pow(a, c) y = Max(m, p)}"
    made = to_precision(from_text(f"(float[2] x) => (float[2] y) {body}"), "float16")
    types = {n: v.dtype for n, v in made.graph.initializers.items()}
    assert types == {"c": ir.DataType.FLOAT, "c_float16": ir.DataType.FLOAT16}


@pytest.mark.parametrize(("half", "expected"), [("float16", 0), ("bfloat16", 2)])
def test_an_operator_without_bfloat16_in_its_schema_is_an_island(half: Any, expected: int) -> None:
    conv = "(float[1,1,4,4] x) => (float[1,1,3,3] y) <float[1,1,2,2] w = {1, 2, 3, 4}> {y = Conv(x, w)}"
    made = to_precision(from_text(conv), half)
    assert ops(made).count("Cast") == expected
    assert "Cast" not in ops(to_precision(from_text(conv, opset=22), half))  # Conv-22 allows it


def test_a_float_parameter_of_fixed_type_stays_float32() -> None:
    text = (
        "(float[1,1,4,4] x) => (float[1,1,8,8] y) <float[4] s = {1, 1, 2, 2}> "
        "{none = Identity(s) y = Resize(x, , none)}"
    )
    made = to_precision(from_text(text), "float16")
    assert node(made, "Resize").inputs[0].dtype == ir.DataType.FLOAT16  # type: ignore[union-attr]
    assert node(made, "Resize").inputs[2].dtype == ir.DataType.FLOAT  # type: ignore[union-attr]
    onnx.checker.check_model(ir.to_proto(made), full_check=True)


def test_branches_of_if_agree_on_the_type_of_their_results() -> None:
    text = (
        "(bool c, float[2] x) => (float[2] y) {y = If (c) <"
        "then_branch = a () => (float[2] p) {p = Sqrt(x)}, else_branch = b () => (float[2] q) {q = Relu(x)}>}"
    )
    made = to_precision(from_text(text), "float16")
    proto = ir.to_proto(made)
    onnx.checker.check_model(proto, full_check=True)
    session = ort.InferenceSession(proto.SerializeToString())
    x = np.array([4.0, 9.0], np.float16)
    assert session.run(None, {"c": np.array(True), "x": x})[0].tolist() == [2.0, 3.0]
    assert session.run(None, {"c": np.array(False), "x": x})[0].tolist() == [4.0, 9.0]


def test_a_cast_from_float_to_float_vanishes_and_one_from_integers_is_made_once() -> None:
    body = "(int64[2] i, float[2] x) => (float[2] y) {f = Cast<to = 1>(i) g = Cast<to = 1>(x) y = Mul(g, f)}"
    made = to_precision(from_text(body), "float16")
    assert ops(made) == ["Cast", "Mul"]
    assert node(made, "Cast").attributes.get_int("to") == ir.DataType.FLOAT16


def test_an_output_made_by_an_island_keeps_its_name() -> None:
    made = to_precision(from_text("(float[2] x) => (float[2] y) {y = Sqrt(x)}"), "float16")
    assert [(v.name, v.dtype) for v in made.graph.outputs] == [("y", ir.DataType.FLOAT16)]
    onnx.checker.check_model(ir.to_proto(made), full_check=True)


def test_modules_kept_in_float32_can_be_named(decoder: ir.Model) -> None:
    kept = find_islands(decoder, ir.DataType.FLOAT16, ["qkv"])
    products = [n for n in kept if n.op_type == "MatMul" and any("qkv" in s for s in module_scopes(n))]
    assert len(products) == 3


def test_scopes_are_read_from_the_namespace_where_name_scopes_are_missing() -> None:
    props = {"namespace": ": models.Decoder/layers.0: models.Block/layers.0.up: Linear/linear: aten.linear.default"}
    assert module_scopes(ir.node("MatMul", [], metadata_props=props)) == ("layers.0", "layers.0.up")
    assert module_scopes(ir.node("MatMul", [])) == ()


def test_another_dtype_and_a_value_without_type_are_refused() -> None:
    with pytest.raises(InputError, match="dtype is 'int8', to_precision makes: float16, bfloat16"):
        to_precision(from_text("(float[2] x) => (float[2] y) {y = Relu(x)}"), "int8")  # type: ignore[arg-type]
    head = '<ir_version: 10, opset_import: ["": 18, "other": 1]> g (float[2] x) => (float[2] y)'
    untyped = ir.from_onnx_text(head + "{a = other.F(x) y = Relu(a)}")
    with pytest.raises(ExportError, match=r"F '.*' makes a value of unknown type \(a\)"):
        to_precision(untyped, "float16")
