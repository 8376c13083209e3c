"""Routers without training: the fit against plain least squares, the cost of each block, and the budget."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import modpass
from modpass.bench import count_flops
from modpass.errors import InputError
from modpass.training import (
    BlockCalibration,
    block_costs,
    calibrate,
    cosine_change,
    dense_mode,
    relative_change,
    skipped,
)
from modpass.training.calibration import pick
from tests.test_routing_losses import lm_loss
from tests.zoo import ZOO, Decoder, TrilAttention, make, masked, tokens


def small() -> nn.Module:
    """Four blocks, of which the third adds nothing and the first much."""
    torch.manual_seed(5)
    model = Decoder(TrilAttention, width=16).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(2)
        for part in (model.blocks[2].attn.out, model.blocks[2].mlp[2]):  # type: ignore[union-attr,index]
            part.weight.zero_()
            part.bias.zero_()
    return model


@cache
def traced() -> modpass.RoutedModel:
    return modpass.mod_transform(small(), 0.25, every=1, gate="unit", example_inputs=(tokens(2, 12),))


def plain_fit(model: nn.Module, path: str, batches: list[Tensor], score: Any) -> np.ndarray[Any, Any]:
    """The router of one block, by numpy, from the dense model's own module."""
    rows: list[Any] = []
    handle = model.get_submodule(path).register_forward_hook(lambda m, a, o: rows.extend(zip(a[0], o, strict=True)))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    handle.remove()
    return least_squares([(x.tolist(), score(x[None], y[None])[0].tolist()) for x, y in rows])


def least_squares(rows: list[tuple[list[list[float]], list[float]]], capacity: float = 0.25) -> np.ndarray[Any, Any]:
    """The router of rows of tokens and their scores, by numpy."""
    xs, ts = [], []
    for tokens_SD, found in rows:
        order = sorted(found, reverse=True)
        k = max(1, int(capacity * len(found)))
        edge = (order[k - 1] + order[k]) / 2
        xs += tokens_SD
        ts += [(f - edge) / np.std(found, ddof=1) for f in found]
    x, t = np.array(xs), np.array(ts)
    ridge = 1e-3 * (x**2).sum() / x.shape[1]
    x = np.concatenate([x, ridge**0.5 * np.eye(x.shape[1])])
    return np.linalg.lstsq(x, np.concatenate([t, np.zeros(x.shape[1])]), rcond=None)[0]


@pytest.mark.parametrize("score", [relative_change, cosine_change])
def test_the_fit_equals_plain_least_squares_on_the_dense_models_stream(score: Any) -> None:
    model, batches = copy.deepcopy(traced()), [tokens(2, 16), tokens(3, 20)]
    found = calibrate(model, batches, score=score, first_token=False)
    for name in ("blocks.0", "blocks.3"):
        wanted = plain_fit(small(), name, batches, score)
        assert np.allclose(model.routed_blocks[name].router.weight.numpy(force=True), wanted, rtol=1e-3, atol=1e-4)
        assert found.blocks[name].agreement > 0.3, "chance is 0.25"


def test_a_score_that_is_linear_is_met_exactly_and_its_sign_decides_causally() -> None:
    model, ids = copy.deepcopy(traced()), tokens(1, 24)
    direction = torch.randn(16)
    found = calibrate(model, [ids], score=lambda x, y: x @ direction, first_token=False)
    assert found.blocks["blocks.0"].agreement == 1.0
    model(ids)
    last = model.routed_blocks["blocks.0"].last
    assert last is not None
    top = torch.zeros(24, dtype=torch.bool)
    top[last.index[0]] = True
    assert ((last.scores[0] > 0) == top).float().mean() > 0.8


def test_padding_has_no_say_in_the_fit() -> None:
    inputs = masked(3, 16, "right")
    model = modpass.mod_transform(make("llama"), 0.25, gate="unit")
    calibrate(model, [inputs])
    first = {n: b.router.weight.detach().clone() for n, b in model.routed_blocks.items()}
    other = torch.where(inputs["attention_mask"] == 1, inputs["input_ids"], 5)
    calibrate(model, [{**inputs, "input_ids": other}])
    assert all(torch.allclose(first[n], b.router.weight, atol=1e-4) for n, b in model.routed_blocks.items())


def test_a_block_that_adds_nothing_costs_nothing_and_is_routed_first() -> None:
    model, ids = copy.deepcopy(traced()), tokens(4, 16)
    found = calibrate(model, [ids], budget=0.9)
    assert found.blocks["blocks.2"].lost < 1e-9
    assert min(found.blocks[f"blocks.{i}"].lost for i in (0, 1, 3)) > 1e-4
    assert found.picked == ("blocks.2",)
    assert found.share() <= 0.9 < found.share([])
    assert [b.capacity for b in model.routed_blocks.values()] == [0.25] * 4, "dense mode was left on"


def test_a_loss_of_ones_own_is_what_a_block_costs() -> None:
    model, ids = copy.deepcopy(traced()), tokens(4, 16)
    found = calibrate(model, [ids], loss=lm_loss)
    dense = lm_loss(small()(ids), ids)
    alone = modpass.mod_transform(small(), 0.25, blocks=["blocks.1"], gate="unit", example_inputs=(ids,))
    alone.load_state_dict(model.state_dict(), strict=False)
    assert found.blocks["blocks.1"].lost == pytest.approx((lm_loss(alone(ids), ids) - dense).item(), abs=1e-4)


def test_fitted_routers_lose_less_than_the_same_routers_turned_round() -> None:
    model, batches = copy.deepcopy(traced()), [tokens(4, 24), tokens(4, 24)]
    found = calibrate(model, batches)
    fitted = sum(b.lost for b in found.blocks.values())
    for block in model.routed_blocks.values():
        block.router.weight.data.neg_()
    turned = sum(block_costs(model, batches).values())
    assert fitted < 0.95 * turned


def test_the_first_real_token_goes_through_whatever_its_score_says() -> None:
    inputs = masked(3, 16, "left")
    model = modpass.mod_transform(make("llama"), 0.25, gate="unit").eval()

    def never_the_first(x: Tensor, y: Tensor) -> Tensor:
        score = relative_change(x, y)
        first = inputs["attention_mask"].argmax(1)
        return score.scatter(1, first[:, None], -10.0)

    first, firsts = inputs["attention_mask"].argmax(1), []
    for first_token in (True, False):
        calibrate(model, [inputs], score=never_the_first, first_token=first_token)
        with modpass.recorded_choices() as choices:
            model(**inputs)
        # The first routed block, which is given the stream that its router was fitted on.
        firsts.append((choices["model.layers.1"] == first[:, None]).any(1).tolist())
    assert firsts == [[True] * 3, [False] * 3]


def test_a_blocks_cost_is_that_of_the_whole_model_run_with_it_alone_changed() -> None:
    model, batches = copy.deepcopy(traced()).eval(), [tokens(2, 16), tokens(3, 20)]
    routed = block_costs(model, batches, lm_loss)
    dropped = block_costs(model, batches, lm_loss, lambda name: skipped(model, [name]))
    plain = small()
    for name in model.routed_blocks:
        shorter = copy.deepcopy(plain)
        del shorter.blocks[int(name[-1])]  # type: ignore[union-attr,operator,arg-type]
        with torch.no_grad():
            base = [lm_loss(plain(b), b).item() for b in batches]
            with dense_mode(model, but=[name]):
                one = [lm_loss(model(b), b).item() for b in batches]
            without = [lm_loss(shorter(b), b).item() for b in batches]
        assert routed[name] == pytest.approx(np.mean(one) - np.mean(base), abs=1e-5)
        assert dropped[name] == pytest.approx(np.mean(without) - np.mean(base), abs=1e-5)
    assert not any("forward" in b.__dict__ or b._forward_hooks for b in model.routed_blocks.values())


def test_costs_and_agreement_are_those_of_other_batches_where_there_are_some() -> None:
    model, few, others = copy.deepcopy(traced()), [tokens(1, 12)], [tokens(4, 20)]
    own = calibrate(model, few).blocks["blocks.3"]
    other = calibrate(model, few, held_out=others).blocks["blocks.3"]
    assert own.agreement > other.agreement, "12 tokens fit 16 weights"
    assert other.lost == pytest.approx(block_costs(model.eval(), others)["blocks.3"])


def test_a_compiled_model_is_calibrated_as_it_would_be_without(monkeypatch: pytest.MonkeyPatch) -> None:
    from modpass.decode.example import tiny_decoder

    ids = torch.arange(10).reshape(1, 10)
    plain, model = tiny_decoder(True), tiny_decoder(True)
    model.load_state_dict(plain.state_dict())
    compiled = torch.compile(model, backend="eager")
    compiled(ids)
    wanted, found = calibrate(plain, [ids]), calibrate(compiled, [ids])
    assert found.blocks["blocks.1"].lost == pytest.approx(wanted.blocks["blocks.1"].lost)
    weights = [m.routed_blocks["blocks.1"].router.weight for m in (plain, model)]
    assert torch.allclose(*weights)


def test_auto_stays_within_the_budget_by_another_count_of_operations() -> None:
    ids, budget = tokens(4, 32), 0.6
    routed = modpass.mod_transform(
        small(), 0.25, blocks="auto", budget=budget, calibration=[ids], gate="unit", example_inputs=(tokens(2, 12),)
    )
    dense = modpass.trace(small(), (tokens(2, 12),))
    share = count_flops(routed, {"ids": ids}).total / count_flops(dense, {"ids": ids}).total
    assert budget - 0.25 < share <= budget
    assert "blocks.2" in routed.routed_blocks
    wide = copy.deepcopy(traced())
    found = calibrate(wide, [ids], budget=budget)
    assert list(routed.routed_blocks) == list(found.picked)
    assert found.share() == pytest.approx(share, rel=1e-6)
    for name, block in routed.routed_blocks.items():
        assert torch.allclose(block.router.weight, wide.routed_blocks[name].router.weight, atol=1e-5)


def test_the_cheapest_per_saving_goes_first() -> None:
    blocks = {
        "large": BlockCalibration(1.0, 0.3, (60, 10)),
        "small": BlockCalibration(1.0, 0.2, (20, 10)),
        "free": BlockCalibration(1.0, -0.1, (20, 10)),
    }
    whole = {"whole": BlockCalibration(1.0, -1.0, (20, 20))}
    assert pick({**blocks, **whole}, 100, 0.95) == ("free",), "what saves nothing is not routed"
    assert [pick(blocks, 100, b) for b in (1.0, 0.95, 0.5, 0.31)] == [
        (),
        ("free",),
        ("large", "free"),
        ("large", "small", "free"),
    ]


def test_what_cannot_be_calibrated_is_refused() -> None:
    with pytest.raises(InputError, match="there are no batches to calibrate on"):
        calibrate(traced(), [])
    with pytest.raises(
        InputError, match=r"budget is 0\.1, but with every block routed 0\.\d+ of the operations are left"
    ):
        calibrate(copy.deepcopy(traced()), [tokens(2, 16)], budget=0.1)
    with pytest.raises(InputError, match=r"budget is 2; it must be in \(0, 1\]"):
        calibrate(copy.deepcopy(traced()), [tokens(2, 16)], budget=2)
    for batch, kind in ((tokens(2, 16), "Tensor"), ({"ids": tokens(2, 16)}, "dict")):
        with pytest.raises(InputError, match=rf"batches is one {kind}; give a list of batches, such as \[batch\]"):
            calibrate(traced(), batch)
    with pytest.raises(InputError, match=r"score gave the shape \[2\] for block 'blocks.0'; it must be \[2, 16\]"):
        calibrate(copy.deepcopy(traced()), [tokens(2, 16)], score=lambda x, y: x[:, 0, 0])
    with (
        pytest.raises(InputError, match=r"there is no routed block 'blocks\.9'; there are: blocks\.0"),
        skipped(traced(), ["blocks.9"]),
    ):
        pass
    broken = copy.deepcopy(traced())
    broken.get_parameter("embed.weight").data.fill_(float("nan"))
    with pytest.raises(InputError, match=r"block 'blocks.0' was given or gave values that are not finite"):
        calibrate(broken, [tokens(2, 16)])
    padded = modpass.mod_transform(make("llama"), 0.25, gate="unit")
    nothing = {"input_ids": tokens(1, 8), "attention_mask": torch.zeros(1, 8, dtype=torch.int64)}
    with pytest.raises(InputError, match="got no real token to fit its router on; are the batches padding alone"):
        calibrate(padded, [nothing])
    with pytest.raises(InputError, match="budget is 1, which the dense model meets without routing"):
        modpass.mod_transform(
            small(), 0.5, blocks="auto", budget=1.0, calibration=[tokens(2, 12)], example_inputs=(tokens(2, 12),)
        )
    with pytest.raises(InputError, match='blocks="auto", budget= and calibration= belong together'):
        modpass.mod_transform(small(), blocks="auto", example_inputs=ZOO["tril-buffer"].example_inputs())
