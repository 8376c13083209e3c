"""The routed model against the dense model and against the slow reference."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modpass
from modpass.reference import Setting, routed_reference
from tests.zoo import ZOO, Decoder, first, make, tokens


def inputs_of(name: str, B: int, S: int, side: str = "none") -> dict[str, Any]:
    return ZOO[name].inputs(B, S, side)


def keep_of(name: str, inputs: dict[str, Any]) -> Tensor | None:
    if "attention_mask" in inputs:
        return inputs["attention_mask"]
    return ~inputs["src_key_padding_mask"] if "src_key_padding_mask" in inputs else None


def transform(name: str, model: nn.Module, capacity: float, **options: Any) -> modpass.RoutedModel:
    return modpass.mod_transform(
        model,
        capacity,
        example_inputs=ZOO[name].example_inputs(),
        padding_mask=ZOO[name].padding_mask,
        **options,
    )


@cache
def routed_pair(name: str) -> tuple[nn.Module, modpass.RoutedModel]:
    """A model of the zoo and its routed form, traced once; tests set capacity and gate on its blocks."""
    model = make(name)
    return model, transform(name, model, 0.5)


def set_blocks(routed: modpass.RoutedModel, capacity: float, gate: str) -> None:
    for block in routed.routed_blocks.values():
        block.capacity, block.gate = capacity, gate


def settings_of(routed: modpass.RoutedModel) -> dict[str, Setting]:
    return {
        n: Setting(b.capacity, b.gate, b.router.weight, b.seq_dim, order=b.order)
        for n, b in routed.routed_blocks.items()
    }


def real(output: Tensor, keep: Tensor | None, seq_first: bool = False) -> Tensor:
    """The rows of real tokens: what a model makes of padding is nobody's business."""
    output = output.transpose(0, 1) if seq_first else output
    return output if keep is None or output.dim() != 3 else output[keep.bool()]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("name", ZOO)
def test_unit_gate_at_full_capacity_equals_the_dense_model(name: str) -> None:
    model = make(name)
    routed = transform(name, model, 1.0, gate="unit", every=1)
    for B, S, side in ((3, 19, "left"), (1, 30, "right")):
        inputs = inputs_of(name, B, S, side)
        with torch.no_grad():
            assert relative(first(routed(**inputs)), first(model(**inputs))) < 1e-5


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("capacity", [0.125, 0.5])
@pytest.mark.parametrize("name", ZOO)
def test_routed_model_equals_the_slow_reference(name: str, capacity: float, side: str) -> None:
    model, routed = routed_pair(name)
    set_blocks(routed, capacity, {"none": "linear", "left": "sigmoid", "right": "unit"}[side])
    inputs = inputs_of(name, 3, 26, side)
    keep, chosen = keep_of(name, inputs), {}
    with torch.no_grad(), modpass.recorded_choices() as choices:
        found = first(routed(**inputs))
    with torch.no_grad(), routed_reference(model, settings_of(routed), keep, chosen) as reference:
        wanted = first(reference(**inputs))
    assert {n: c.tolist() for n, c in choices.items()} == chosen
    seq_first = name == "encoder-sbd"
    assert relative(real(found, keep, seq_first), real(wanted, keep, seq_first)) < 1e-4
    with torch.no_grad():
        dense = first(model(**inputs))
    assert relative(real(found, keep, seq_first), real(dense, keep, seq_first)) > 1e-3, "routing changed nothing"


@pytest.mark.parametrize("name", ["llama", "tril-buffer", "alibi", "inner-rotary", "encoder-sbd"])
def test_a_row_gives_the_same_alone_and_in_a_batch(name: str) -> None:
    _, routed = routed_pair(name)
    set_blocks(routed, 0.25, "linear")
    inputs = inputs_of(name, 3, 20)
    batch_dim = 1 if name == "encoder-sbd" else 0
    one = {k: (v[:, 1:2] if v.dim() == 3 and batch_dim else v[1:2]) for k, v in inputs.items()}
    with torch.no_grad():
        together, alone = first(routed(**inputs)), first(routed(**one))
    assert relative(alone, together.narrow(batch_dim, 1, 1)) < 1e-5


@pytest.mark.parametrize("name", ["llama", "dinov2", "encoder-sbd"])
def test_neighbouring_blocks_can_both_be_routed(name: str) -> None:
    model = make(name)
    routed = transform(name, model, 0.5, every=1)
    inputs = inputs_of(name, 3, 12, "left")
    keep = keep_of(name, inputs)
    with torch.no_grad(), routed_reference(model, settings_of(routed), keep) as reference:
        wanted = real(first(reference(**inputs)), keep, name == "encoder-sbd")
        assert relative(real(first(routed(**inputs)), keep, name == "encoder-sbd"), wanted) < 1e-4


def test_parameters_are_shared_by_name_and_storage() -> None:
    model = make("llama")
    routed = transform("llama", model, 0.5)
    dense, mine = model.state_dict(), routed.state_dict()
    assert set(mine) - set(dense) == {f"{n}.router.weight" for n in routed.routed_blocks}
    assert set(dense) <= set(mine)
    assert all(mine[n].data_ptr() == dense[n].data_ptr() for n in dense)
    assert all(b.router.weight.shape == (48,) for b in routed.routed_blocks.values())


def test_a_dense_state_dict_loads_with_only_router_keys_missing() -> None:
    routed = transform("llama", make("llama"), 0.5)
    torch.manual_seed(1)
    other = ZOO["llama"].make().state_dict()
    result = routed.load_state_dict(other, strict=False)
    assert result.unexpected_keys == []
    assert set(result.missing_keys) == {f"{n}.router.weight" for n in routed.routed_blocks}


def test_the_model_passed_in_is_not_changed() -> None:
    model = make("bert").train()
    before, code = copy.deepcopy(model.state_dict()), {n: type(m) for n, m in model.named_modules()}
    routed = transform("bert", model, 0.5)
    assert model.training
    assert routed.training
    assert {n: type(m) for n, m in model.named_modules()} == code
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_default_blocks_are_every_second_one_starting_with_the_second() -> None:
    routed = transform("llama", make("llama"), 0.125)
    assert list(routed.routed_blocks) == ["model.layers.1", "model.layers.3"]
    assert all(b.capacity == 0.125 and b.gate == "linear" for b in routed.routed_blocks.values())


def test_blocks_are_chosen_by_name_by_predicate_and_capacity_by_name() -> None:
    model = make("llama")
    assert list(transform("llama", model, 0.5, blocks=["model.layers.2"]).routed_blocks) == ["model.layers.2"]
    chosen = transform(
        "llama",
        model,
        {"model.layers.0": 0.5, "model.layers.1": 0.25},
        blocks=lambda b: b.name.endswith((".0", ".1")),
    ).routed_blocks
    assert {n: b.capacity for n, b in chosen.items()} == {"model.layers.0": 0.5, "model.layers.1": 0.25}


def test_output_structure_is_kept_and_positional_calls_work() -> None:
    model = make("llama")
    routed = transform("llama", model, 0.5)
    inputs = inputs_of("llama", 2, 11)
    with torch.no_grad():
        named, positional, bare = routed(**inputs), routed(*inputs.values()), routed(inputs["input_ids"])
    assert type(named) is type(model(**inputs))
    assert torch.equal(named.logits, positional.logits)
    assert torch.equal(named.logits, bare.logits), "a mask that is left out is all ones"


@pytest.mark.parametrize("name", ["llama", "dinov2", "encoder-sbd"])
def test_a_deep_copy_computes_the_same_and_shares_nothing(name: str) -> None:
    routed = transform(name, make(name), 0.5)
    inputs = inputs_of(name, 2, 11)
    twin = copy.deepcopy(routed)
    with torch.no_grad():
        assert torch.equal(first(twin(**inputs)), first(routed(**inputs)))
        for p in twin.parameters():
            p.zero_()
        assert not torch.equal(first(twin(**inputs)), first(routed(**inputs)))


def test_a_shallow_copy_is_a_routed_model_on_the_same_weights() -> None:
    routed = transform("llama", make("llama"), 0.5)
    inputs = inputs_of("llama", 2, 11)
    twin = copy.copy(routed)
    assert list(twin.routed_blocks.items()) == list(routed.routed_blocks.items())
    assert {n: id(p) for n, p in twin.named_parameters()} == {n: id(p) for n, p in routed.named_parameters()}
    with torch.no_grad():
        assert torch.equal(twin(**inputs).logits, routed(**inputs).logits)
    nodes = len(routed.graph.nodes)
    twin.graph.create_node("placeholder", "another")
    assert len(routed.graph.nodes) == nodes


@pytest.mark.parametrize("kind", ["program", "decomposed program"])
def test_an_exported_program_is_transformed_like_its_module(kind: str) -> None:
    model = make("llama")
    inputs = inputs_of("llama", 2, 13)
    dim = torch.export.Dim.AUTO
    program = torch.export.export(
        model,
        (),
        {**inputs, "use_cache": False},
        strict=False,
        dynamic_shapes={"input_ids": {0: dim, 1: dim}, "attention_mask": {0: dim, 1: dim}, "use_cache": None},
    )
    if kind == "decomposed program":
        program = program.run_decompositions()
    routed = modpass.mod_transform(program, 0.5)
    expected = transform("llama", model, 0.5)
    expected.load_state_dict(routed.state_dict())
    inputs = inputs_of("llama", 3, 18, "left")
    with torch.no_grad():
        assert relative(routed(**inputs).logits, expected(**inputs).logits) < 1e-5


class PlainAttention(nn.Module):
    """Attention that ``symbolic_trace`` can follow."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.drop(torch.softmax(self.q(x) @ self.k(x).transpose(1, 2) / 7, -1))
        return scores @ self.v(x)


def test_a_symbolically_traced_module_is_transformed_like_its_original() -> None:
    model = Decoder(PlainAttention).eval()
    graph_module = torch.fx.symbolic_trace(model)
    assert {n.op for n in graph_module.graph.nodes} >= {"call_module", "call_method", "call_function"}
    routed = modpass.mod_transform(graph_module, 0.5, example_inputs=(tokens(2, 11),))
    assert list(routed.routed_blocks) == ["blocks.1", "blocks.3"]
    assert set(routed.state_dict()) - set(model.state_dict()) == {f"blocks.{i}.router.weight" for i in (1, 3)}
    ids = tokens(3, 14)
    with torch.no_grad(), routed_reference(model, settings_of(routed)) as reference:
        assert relative(routed(ids), reference(ids)) < 1e-4
