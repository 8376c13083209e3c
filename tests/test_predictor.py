"""The predictor: it decides in the router's place, everywhere alike, and never teaches the model."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor

import modpass
from modpass.decode.example import tiny_decoder
from modpass.errors import StateError
from modpass.exporters import DecoderSession, FixedShape, export_decoder, export_onnx, verify
from modpass.reference import Setting, routed_reference
from modpass.router import Predictor
from tests.decoders import LENGTH, dense, full_forward, generated
from tests.zoo import ZOO, first, make, tokens


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@cache
def predicted(name: str) -> modpass.RoutedModel:
    """A causal model whose predictors let some tokens through, and other ones than its routers would."""
    routed = modpass.mod_transform(
        dense(name)[0], 0.5, selection="causal", predictor=True, example_inputs=ZOO[name].example_inputs()
    )
    for i, block in enumerate(routed.routed_blocks.values()):
        draws = torch.Generator().manual_seed(i)
        assert block.predictor is not None
        for parameter in block.predictor.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draws) * 0.3
        block.max_sequence = LENGTH
        with torch.no_grad():
            routed(**ZOO[name].inputs(4, LENGTH, "none"))
            assert block.last is not None
            block.predictor.down.bias.sub_(block.last.logits.quantile(0.65))  # a third passes, not all at once
    return routed


def settings_of(routed: modpass.RoutedModel) -> dict[str, Setting]:
    found = {}
    for name, block in routed.routed_blocks.items():
        up, down = block.predictor.up, block.predictor.down  # type: ignore[union-attr]

        def decides(token: Tensor, up: torch.nn.Linear = up, down: torch.nn.Linear = down) -> Tensor:
            hidden = [float(row @ token) + float(b) for row, b in zip(up.weight, up.bias, strict=True)]
            gelu = [h * 0.5 * (1 + torch.erf(torch.tensor(h / 2**0.5))) for h in hidden]
            return sum((w * g for w, g in zip(down.weight[0], gelu, strict=True)), down.bias[0])

        found[name] = Setting(0.5, block.gate, block.router.weight, selection="causal", decides=decides)
    return found


@pytest.mark.parametrize("name", ["llama", "tril-buffer"])
def test_selection_by_predictor_equals_the_slow_reference(name: str) -> None:
    routed, inputs = predicted(name), ZOO[name].inputs(2, LENGTH, "left")
    keep, chosen = inputs.get("attention_mask"), dict[str, list[list[int]]]()
    with torch.no_grad(), modpass.recorded_choices() as choices:
        found = first(routed(**inputs))
    with torch.no_grad(), routed_reference(dense(name)[0], settings_of(routed), keep, chosen) as reference:
        wanted = first(reference(**inputs))
    assert {n: [[i for i in row if i < LENGTH] for row in c.tolist()] for n, c in choices.items()} == chosen
    assert any(0 < len(row) < LENGTH // 2 for rows in chosen.values() for row in rows)
    rows = slice(None) if keep is None else keep.bool()
    assert relative(found[rows], wanted[rows]) < 1e-4


def test_the_predictor_chooses_otherwise_than_the_router() -> None:
    routed, ids = predicted("tril-buffer"), tokens(2, LENGTH)
    with torch.no_grad(), modpass.recorded_choices() as choices:
        routed(ids)
    block = routed.routed_blocks["blocks.1"]
    assert block.last is not None
    by_router = block.choose(block.last.scores, None)
    assert not torch.equal(choices["blocks.1"], by_router)


@pytest.mark.parametrize("skipping", ["masked", "conditional"])
def test_prefill_and_decode_decide_as_the_forward_does(skipping: str) -> None:
    routed, ids = predicted("inner-rotary"), tokens(1, LENGTH)
    logits, positions, state = generated(routed, ids, torch.tensor([7]), skipping=skipping)
    wanted = full_forward(routed, ids)
    assert relative(logits[0], wanted[0, positions[0]]) < 1e-4
    assert any(0 < int(v) < LENGTH // 2 for n, v in state.items() if n.endswith(".count")), "every slot was taken"


def test_exported_files_decide_as_the_forward_does(tmp_path: Path) -> None:
    routed = tiny_decoder(True)
    block = routed.routed_blocks["blocks.1"]
    block.predictor = Predictor(8)
    with torch.no_grad():
        block.predictor.down.weight.mul_(20)
        block.predictor.down.bias.zero_()
    block.max_sequence = LENGTH
    export_onnx(routed, tmp_path / "model.onnx", FixedShape(batch=2, sequence=LENGTH))
    report = verify(routed, tmp_path / "model.onnx").check()
    assert set(report.choices.values()) == {1.0}
    export_decoder(routed, tmp_path / "decoder", prompt=6, max_sequence=LENGTH)
    ids = torch.randint(11, (1, 6))
    found = DecoderSession(tmp_path / "decoder").generate(ids.tolist(), max_new_tokens=10)
    for _ in range(10):
        ids = torch.cat([ids, full_forward(routed, ids)[:, -1:].argmax(-1)], 1)
    assert list(found.tokens[0]) == ids[0, 6:].tolist()
    assert 0 < found.statistics.skipped_share < 1
    block.predictor = None
    assert verify(routed, tmp_path / "model.onnx").choices["blocks.1"] < 1.0, "the router would have chosen the same"


@pytest.mark.slow
def test_in_half_precision_files_the_predictor_stays_in_float32(tmp_path: Path) -> None:
    routed = tiny_decoder(True)
    routed.routed_blocks["blocks.1"].predictor = Predictor(8)
    export_decoder(routed, tmp_path / "decoder", prompt=6, max_sequence=LENGTH, dtype="float16")
    for name in ("prefill.onnx", "decode.onnx"):
        graph = onnx.load(tmp_path / "decoder" / name, load_external_data=False).graph
        kinds = {t.name: t.data_type for t in graph.initializer}
        own, others = set[int](), set[int]()
        for node in (n for n in graph.node if n.op_type == "MatMul"):
            inside = any(".predictor" in p.value for p in node.metadata_props if p.key.endswith("name_scopes"))
            (own if inside else others).update(kinds[i] for i in node.input if i in kinds)
        assert own == {onnx.TensorProto.FLOAT}
        assert others == {onnx.TensorProto.FLOAT16}
        assert kinds["blocks.1.router.weight"] == onnx.TensorProto.FLOAT


def test_predictors_add_their_own_names_and_stay_in_float32() -> None:
    model = make("llama")
    routed = modpass.mod_transform(model, 0.5, predictor=True)
    result = routed.load_state_dict(model.state_dict(), strict=False)
    parts = (
        "router.weight",
        "predictor.up.weight",
        "predictor.up.bias",
        "predictor.down.weight",
        "predictor.down.bias",
    )
    assert set(result.missing_keys) == {f"{n}.{part}" for n in routed.routed_blocks for part in parts}
    half = copy.deepcopy(routed).to(torch.bfloat16)
    assert {p.dtype for n, p in half.named_parameters() if ".predictor." in n} == {torch.float32}


def test_a_predictor_gives_the_stream_no_gradient_and_stays_exact_under_autocast() -> None:
    predictor, x = Predictor(16), torch.randn(2, 5, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        logits = predictor(x)
    assert torch.equal(logits, predictor(x))
    logits.sum().backward()
    assert x.grad is None
    assert predictor.up.weight.grad is not None


def test_predictors_and_causal_evaluation_are_saved_and_loaded(tmp_path: Path) -> None:
    routed = modpass.mod_transform(make("llama"), 0.5, predictor=True).use_causal()
    modpass.save_pretrained(routed, tmp_path)
    loaded = modpass.load(tmp_path)
    inputs = ZOO["llama"].inputs(2, 13, "left")
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, routed(**inputs).logits)
    assert {b.selection for b in loaded.routed_blocks.values()} == {"causal"}
    assert {b.selection for b in loaded.train().routed_blocks.values()} == {"expert_choice"}


def test_use_causal_holds_in_eval_mode_alone_and_can_be_undone() -> None:
    routed = modpass.mod_transform(dense("tril-buffer")[0], 0.25, example_inputs=ZOO["tril-buffer"].example_inputs())
    ids = tokens(2, LENGTH)
    by_top_k = full_forward(routed.eval(), ids)
    changed = torch.cat([ids[:, :9], tokens(2, LENGTH - 9)], 1)
    routed.use_causal()
    assert torch.equal(full_forward(routed, ids)[:, :9], full_forward(routed, changed)[:, :9])
    assert {b.selection for b in routed.train().routed_blocks.values()} == {"expert_choice"}
    assert torch.equal(full_forward(routed.eval().use_causal(False), ids), by_top_k)


def test_what_cannot_be_saved_whole_is_refused(tmp_path: Path) -> None:
    routed = modpass.mod_transform(make("llama"), 0.5)
    one = routed.routed_blocks["model.layers.1"]
    one.ready_causal()
    one.eval_selection = "causal"
    with pytest.raises(StateError, match="some blocks select causally in eval mode and some do not"):
        modpass.save_pretrained(routed, tmp_path)
    one.eval_selection, one.gate_mix = None, 0.25
    with pytest.raises(StateError, match=r"gate_mix 0.25, midway from the unit gate to 'linear'; end the gate's"):
        modpass.save_pretrained(routed, tmp_path)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("predictor", "yes", "'settings.predictor' is \"yes\"; it must be true or false"),
        ("predictor", True, "predictor of a block"),
    ],
)
def test_a_saved_model_with_a_wrong_predictor_is_refused(
    setting: str, value: object, message: str, tmp_path: Path
) -> None:
    modpass.save_pretrained(modpass.mod_transform(make("llama"), 0.5), tmp_path)
    raw = json.loads((tmp_path / "modpass.json").read_text())
    raw["settings"][setting] = value
    (tmp_path / "modpass.json").write_text(json.dumps(raw))
    with pytest.raises(StateError, match=message):
        modpass.load(tmp_path)
