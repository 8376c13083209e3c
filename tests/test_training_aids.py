"""Schedules, freezing and distillation."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import modpass
from modpass.errors import CapacityError, InputError, StateError
from modpass.reference import Setting, routed_reference
from modpass.training import (
    block_outputs,
    capacity_schedule,
    dense_mode,
    distillation_loss,
    gate_schedule,
    hidden_losses,
    routers_only,
    routing_losses,
)
from tests.test_routing_losses import fresh, lm_loss, traced
from tests.zoo import make, masked, tokens


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


# Schedules


def chosen(model: modpass.RoutedModel) -> set[int]:
    with torch.no_grad(), modpass.recorded_choices() as choices:
        model(tokens(1, 16))
    return {c.shape[1] for c in choices.values()}


def test_a_capacity_goes_down_step_by_step_and_stays_at_its_end() -> None:
    model = fresh("tril-buffer")
    schedule, found = capacity_schedule(model, 1.0, 0.25, steps=3, delay=1), []
    for _ in range(6):
        found.append(chosen(model))
        schedule.step()
    assert found == [{16}, {16}, {12}, {8}, {4}, {4}]


def test_a_capacity_set_by_hand_stays_through_ten_steps() -> None:
    model, ids = fresh("tril-buffer"), tokens(2, 16)
    for block in model.routed_blocks.values():
        block.capacity = 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(10):
        (lm_loss(model(ids), ids) + routing_losses(model).total).backward()
        optimizer.step()
        assert {b.capacity for b in model.routed_blocks.values()} == {0.5}
    assert chosen(model) == {8}


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_a_resumed_schedule_goes_on_as_one_that_never_stopped(shape: Any) -> None:
    whole, model = fresh("tril-buffer"), fresh("tril-buffer")
    straight = capacity_schedule(whole, 1.0, 0.25, steps=8, levels=4, shape=shape)
    first = capacity_schedule(model, 1.0, 0.25, steps=8, levels=4, shape=shape)
    for _ in range(5):
        straight.step(), first.step()
    kept = json.loads(json.dumps(first.state_dict()))
    again = fresh("tril-buffer")
    resumed = capacity_schedule(again, 0.9, 0.1, steps=2)
    resumed.load_state_dict(kept)
    for _ in range(5):
        values = {b.capacity for m in (whole, again) for b in m.routed_blocks.values()}
        assert values == {straight.value}
        straight.step(), resumed.step()
    assert straight.value == 0.25


def test_levels_bound_the_number_of_shapes() -> None:
    schedule = capacity_schedule(fresh("tril-buffer"), 1.0, 0.25, steps=30, levels=4)
    assert {round(schedule.step(), 6) for _ in range(40)} == {1.0, 0.75, 0.5, 0.25}


@pytest.mark.parametrize("gate", ["linear", "sigmoid"])
def test_a_mixed_gate_weighs_as_the_slow_reference(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, dense, ids = fresh("tril-buffer").eval(), make("tril-buffer"), tokens(2, 16)
    for block in model.routed_blocks.values():
        block.gate = gate
    schedule = gate_schedule(model, steps=4)
    schedule.step()
    settings = {n: Setting(0.25, gate, b.router.weight) for n, b in model.routed_blocks.items()}

    def mixed(kind: str, score: Tensor) -> Tensor:
        return 0.75 + 0.25 * (score if kind == "linear" else 1 / (1 + torch.exp(-score)))

    monkeypatch.setattr("modpass.reference._gate", mixed)
    with torch.no_grad(), routed_reference(dense, settings) as reference:
        assert relative(model(ids), reference(ids)) < 1e-4


def test_a_gate_starts_at_the_unit_gate_and_ends_at_its_own() -> None:
    model, ids, found = fresh("tril-buffer").eval(), tokens(2, 16), []
    with torch.no_grad():
        own = model(ids)
        schedule = gate_schedule(model, steps=1)
        found.append(model(ids))
        for block in model.routed_blocks.values():
            block.gate = "unit"
        assert relative(found[0], model(ids)) < 1e-5
        for block in model.routed_blocks.values():
            block.gate = "linear"
        schedule.step()
        assert torch.equal(model(ids), own)


@pytest.mark.parametrize(
    ("make_it", "error", "message"),
    [
        (lambda m: capacity_schedule(m, 1.5, 0.5, 3), CapacityError, r"must be a number in \(0, 1\]"),
        (lambda m: capacity_schedule(m, 1.0, 0.5, 0), InputError, "steps is 0; it must be a whole number of 1 or more"),
        (lambda m: capacity_schedule(m, 1.0, 0.5, 3, levels=1), InputError, "levels is 1; it must be a whole number"),
        (lambda m: capacity_schedule(m, 1.0, 0.5, 3, shape="step"), InputError, "shape is 'step'; it must be one of"),
        (
            lambda m: capacity_schedule(m, 1.0, 0.5, 3, blocks=lambda n: False),
            InputError,
            "there are: blocks.1, blocks.3",
        ),
        (lambda m: gate_schedule(m, 3, end=2.0), InputError, r"goes from 0.0 to 2.0; both must be in \[0, 1\]"),
        (
            lambda m: gate_schedule(_unit(m), 3),
            InputError,
            "block 'blocks.1' has the unit gate, whose weight is always 1",
        ),
        (lambda m: gate_schedule(m, 3).load_state_dict({}), StateError, "schedule of gate_mix: it holds nothing"),
    ],
)
def test_a_wrong_schedule_is_refused(make_it: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_it(fresh("tril-buffer"))


def _unit(model: modpass.RoutedModel) -> modpass.RoutedModel:
    for block in model.routed_blocks.values():
        block.gate = "unit"
    return model


# Freezing


def test_routers_only_leaves_every_other_parameter_bit_identical() -> None:
    model, ids = fresh("tril-buffer"), tokens(2, 16)
    before = copy.deepcopy(model.state_dict())
    # Weight decay and momentum must not reach what is frozen, even where the optimizer holds every parameter.
    trained = routers_only(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(10):
        (lm_loss(model(ids), ids) + routing_losses(model, router=0.1).total).backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
    assert changed == {n for n in before if ".router." in n or ".predictor." in n}
    assert len(trained) == len(changed) == 10


# Distillation


def test_dense_mode_is_the_dense_model_and_leaves_no_trace() -> None:
    routed, dense, inputs = traced("llama").eval().use_causal(), make("llama"), masked(2, 14, "left")
    settings = [(b.capacity, b.gate, b.selection, b.last) for b in routed.routed_blocks.values()]
    with torch.no_grad(), dense_mode(routed) as same:
        assert relative(same(**inputs).logits, dense(**inputs).logits) < 1e-5
    assert [(b.capacity, b.gate, b.selection, b.last) for b in routed.routed_blocks.values()] == settings
    routed.use_causal(False)


def test_block_outputs_are_those_of_the_dense_models_modules() -> None:
    model, dense, inputs = traced("llama").eval(), make("llama"), masked(2, 14, "none")
    wanted: dict[str, Tensor] = {}
    for i in (1, 3):
        layer = dense.get_submodule(f"model.layers.{i}")
        layer.register_forward_hook(
            lambda m, a, o, i=i: wanted.__setitem__(f"model.layers.{i}", o if isinstance(o, Tensor) else o[0])
        )
    with torch.no_grad(), dense_mode(model), block_outputs(model) as found:
        model(**inputs)
        dense(**inputs)
    assert list(found) == list(wanted)
    assert all(relative(found[n], wanted[n]) < 1e-5 for n in wanted)
    assert not any(b._forward_hooks for b in model.routed_blocks.values())


def test_the_distillation_loss_equals_plain_python() -> None:
    logits, teacher = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    keep = torch.tensor([[1, 1, 0], [0, 1, 1]])

    def softmax(row: list[float]) -> list[float]:
        top = [math.exp(v / 2) for v in row]
        return [t / sum(top) for t in top]

    found = []
    for b in range(2):
        for s in range(3):
            if keep[b, s]:
                p, q = softmax(teacher[b, s].tolist()), softmax(logits[b, s].tolist())
                found.append(sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)))
    wanted = 4 * sum(found) / 4
    assert distillation_loss(logits, teacher, temperature=2.0, keep=keep).item() == pytest.approx(wanted, rel=1e-4)
    with pytest.raises(InputError, match="temperature is 0; it must be above 0"):
        distillation_loss(logits, teacher, temperature=0)


def test_hidden_losses_are_relative_leave_padding_out_and_name_what_is_missing() -> None:
    own, wanted = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    keep = torch.tensor([[1, 1, 0], [0, 1, 1]])
    real = keep.bool()
    ratio = ((own - wanted)[real].square().mean() / wanted[real].square().mean()).item()
    assert hidden_losses({"a": own}, {"a": wanted}, keep=keep)["a"].item() == pytest.approx(ratio, rel=1e-5)
    with pytest.raises(InputError, match="the teacher has no output of block 'a'; it has: b"):
        hidden_losses({"a": own}, {"b": wanted})


def test_distillation_brings_the_model_nearer_to_its_teacher() -> None:
    torch.manual_seed(2)
    model, ids = fresh("tril-buffer"), tokens(4, 16)
    teacher = copy.deepcopy(model).eval()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(12):
        with torch.no_grad(), dense_mode(teacher), block_outputs(teacher) as wanted:
            target = teacher(ids)
        with block_outputs(model) as found:
            logits = model(ids)
        hidden = torch.stack(list(hidden_losses(found, wanted).values())).mean()
        loss = distillation_loss(logits, target) + hidden
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    assert all(p.grad is None for p in teacher.parameters())
    assert F.mse_loss(logits, target) > 0
