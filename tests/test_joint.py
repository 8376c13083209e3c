"""Blocks that are picked together: each step is what a plain model with just those blocks routed says it is."""

from __future__ import annotations

import copy

import pytest
import torch

import modpass
from modpass.errors import InputError
from modpass.training import Picked, calibrate, pick_blocks
from tests.test_calibration import small, traced
from tests.test_routing_losses import lm_loss
from tests.zoo import tokens


def calibrated() -> modpass.RoutedModel:
    model = copy.deepcopy(traced())
    calibrate(model, [tokens(4, 24)])
    return model.eval()


def loss_with(model: modpass.RoutedModel, capacities: dict[str, float], batches: list[torch.Tensor]) -> float:
    """The loss of the plain model without the layers of capacity 0, routed anew in the others."""
    plain = small()
    kept = [i for i in range(4) if capacities.get(f"blocks.{i}") != 0]
    plain.blocks = torch.nn.ModuleList(plain.blocks[i] for i in kept)  # type: ignore[union-attr,index,arg-type]
    own = {f"blocks.{kept.index(i)}": i for i in kept if f"blocks.{i}" in capacities}
    if own:
        wanted = {n: capacities[f"blocks.{i}"] for n, i in own.items()}
        plain = modpass.mod_transform(plain, wanted, blocks=list(own), gate="unit", example_inputs=(batches[0],)).eval()
        for name, i in own.items():
            weight = model.routed_blocks[f"blocks.{i}"].router.weight
            plain.routed_blocks[name].router.weight.data.copy_(weight)
    with torch.no_grad():
        return sum(float(lm_loss(plain(b), b)) for b in batches) / len(batches)


@pytest.mark.parametrize("levels", [(0.5, 0.25), (0.0,), (0.5, 0.0)])
def test_each_step_costs_what_the_whole_model_says(levels: tuple[float, ...]) -> None:
    model, batches = calibrated(), [tokens(2, 16), tokens(3, 20)]
    picked = pick_blocks(model, batches, 0.6, capacities=levels, loss=lm_loss)
    dense = loss_with(model, {}, batches)
    now: dict[str, float] = {}
    for step in picked.steps:
        now[step.block] = step.capacity
        assert step.rise == pytest.approx(loss_with(model, now, batches) - dense, abs=1e-5)
        assert picked.capacities(step.share) == now
    assert picked.steps[-1].share <= 0.6 < picked.steps[-2].share
    assert list(picked.capacities()) == sorted(now), "in the order in which they run"
    assert {b.capacity for b in model.routed_blocks.values()} == {0.25}, "a capacity was left behind"


@pytest.mark.slow
def test_the_first_step_is_the_cheapest_and_later_ones_count_what_is_routed_already() -> None:
    model, batches = calibrated(), [tokens(4, 24)]
    picked = pick_blocks(model, batches, 0.3, capacities=(0.25,), loss=lm_loss)
    names = list(model.routed_blocks)
    now: dict[str, float] = {}
    for step in picked.steps:
        found = {n: loss_with(model, {**now, n: 0.25}, batches) for n in names if n not in now}
        # What was found of a block earlier may have become too much since: then another may go before it.
        assert found[step.block] <= sorted(found.values())[min(1, len(found) - 1)] + 1e-6
        now[step.block] = 0.25
    assert len(now) == 4


def test_without_a_loss_the_models_output_counts() -> None:
    model = calibrated()
    picked = pick_blocks(model, [tokens(2, 16)], 0.9, capacities=(0.5,))
    assert picked.steps[0].block == "blocks.2"
    assert picked.steps[0].rise == pytest.approx(0.0, abs=1e-9)
    assert all(s.rise > 0 for s in picked.steps[1:])


def test_the_capacities_make_a_model_through_the_pass() -> None:
    model, ids = calibrated(), tokens(2, 16)
    found = pick_blocks(model, [ids], 0.75, capacities=(0.5, 0.25), loss=lm_loss).capacities()
    routed = modpass.mod_transform(small(), found, blocks=list(found), gate="unit", example_inputs=(ids,)).eval()
    routed.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        assert float(lm_loss(routed(ids), ids)) == pytest.approx(loss_with(model, found, [ids]), abs=1e-6)


def test_training_mode_and_dense_calls_are_as_before() -> None:
    model, ids = calibrated().train(), tokens(2, 16)
    pick_blocks(model, [ids], 0.8, loss=lm_loss)
    assert model.training
    assert not any("forward" in b.__dict__ or b._forward_hooks for b in model.routed_blocks.values())


def test_what_cannot_be_picked_is_refused() -> None:
    model, ids = traced(), [tokens(2, 16)]
    for levels in ((), (0.25, 0.5), (1.0,), (0.5, 0.5), (0.5, -0.1)):
        with pytest.raises(InputError, match="give one or more below 1, from large to small; 0 drops"):
            pick_blocks(model, ids, 0.8, capacities=levels)
    with pytest.raises(InputError, match=r"budget is 1\.5; it must be in \(0, 1\]"):
        pick_blocks(model, ids, 1.5)
    with pytest.raises(
        InputError,
        match=r"budget is 0\.1, but with every block at a capacity of 0\.5 0\.\d+ of the operations are left",
    ):
        pick_blocks(model, ids, 0.1, capacities=(0.5,))
    with pytest.raises(InputError, match="there are no batches to calibrate on"):
        pick_blocks(model, [], 0.5)
    assert pick_blocks(model, ids, 1.0) == Picked((), tuple(model.routed_blocks))
