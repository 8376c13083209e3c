"""Routers fitted to how much a loss depends on each token: against plain autograd of the dense model's own modules."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import modpass
from modpass.errors import InputError
from modpass.training import calibrate, loss_sensitivity
from modpass.training.scores import takes_gradient
from tests.test_calibration import least_squares, small, traced
from tests.test_routing_losses import lm_loss
from tests.zoo import make, masked, tokens


def rows_of(path: str, batch: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Each row's stream before and after a module of the dense model, and the loss's gradient there."""
    model, runs = small(), list[Any]()
    handle = model.get_submodule(path).register_forward_hook(lambda m, a, o: runs.append((a[0], o)))
    loss = lm_loss(model(batch), batch)
    handle.remove()
    ((x, y),) = runs
    (gradient,) = torch.autograd.grad(loss, y)
    return list(zip(x.detach(), y.detach(), gradient, strict=True))


def plain_router(path: str, batches: list[Tensor]) -> np.ndarray[Any, Any]:
    """Least squares by numpy to a product of sizes that is taken token by token."""
    rows = []
    for row in (r for batch in batches for r in rows_of(path, batch)):
        found = []
        for x, y, g in zip(*row, strict=True):
            size = sum((b - a) ** 2 for a, b in zip(x.tolist(), y.tolist(), strict=True)) ** 0.5
            found.append((size * sum(v * v for v in g.tolist()) ** 0.5) ** 0.5)
        rows.append((row[0].tolist(), found))
    return least_squares(rows)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_fit_equals_plain_least_squares_to_plain_gradients(frozen: bool) -> None:
    model, batches = copy.deepcopy(traced()), [tokens(2, 16), tokens(3, 20)]
    model.requires_grad_(not frozen)
    calibrate(model, batches, score=loss_sensitivity, loss=lm_loss, first_token=False)
    for name in ("blocks.0", "blocks.1", "blocks.3"):
        wanted = plain_router(name, batches)
        assert np.allclose(model.routed_blocks[name].router.weight.numpy(force=True), wanted, rtol=1e-3, atol=1e-4)


def test_it_leaves_no_gradient_and_no_weight_but_routers_changed() -> None:
    model = copy.deepcopy(traced()).train()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    calibrate(model, [tokens(2, 16)], score=loss_sensitivity, loss=lm_loss)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {f"blocks.{i}.router.weight" for i in range(4)}
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert model.training
    assert not any(b._forward_hooks for b in model.routed_blocks.values())


def test_padding_has_no_say_in_it() -> None:
    inputs, weights = masked(3, 16, "right"), []
    model = modpass.mod_transform(make("llama"), 0.25, gate="unit")
    keep = inputs["attention_mask"]

    def loss(output: Any, batch: Any) -> Tensor:
        logits = (output[0] if isinstance(output, tuple) else output.logits).float()
        return (logits.logsumexp(-1) * keep).sum()

    for other in (inputs["input_ids"], torch.where(keep == 1, inputs["input_ids"], 5)):
        calibrate(model, [{**inputs, "input_ids": other}], score=loss_sensitivity, loss=loss)
        weights.append({n: b.router.weight.detach().clone() for n, b in model.routed_blocks.items()})
    assert all(torch.allclose(weights[0][n], w, atol=1e-4) for n, w in weights[1].items())
    assert any(w.abs().max() > 1e-2 for w in weights[0].values())


def test_sequence_first_streams_are_read_the_right_way_round() -> None:
    weights = []
    for first in (True, False):
        torch.manual_seed(3)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=first, dropout=0.0)
        encoder = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
        x = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(1))
        given = x if first else x.transpose(0, 1)
        model = modpass.mod_transform(encoder, 0.25, every=1, gate="unit", example_inputs=(given,))
        towards = torch.randn(16, generator=torch.Generator().manual_seed(2))
        calibrate(model, [(given,)], score=loss_sensitivity, loss=lambda y, b, v=towards: (y @ v).square().sum())
        weights.append([b.router.weight for b in model.routed_blocks.values()])
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(*weights, strict=True))


def test_a_token_whose_change_the_loss_does_not_see_passes_by() -> None:
    ids, seen = tokens(2, 16), slice(0, 6)
    rows: list[Tensor] = []

    def kept(x: Tensor, y: Tensor, gradient: Tensor) -> Tensor:
        rows.append(loss_sensitivity(x, y, gradient))
        return rows[-1]

    calibrate(copy.deepcopy(traced()), [ids], score=kept, loss=lambda logits, _: logits[:, seen].logsumexp(-1).sum())
    assert all((r[:, 6:] == 0).all() and (r[:, seen] > 0).all() for r in rows[:4] if r.any())
    assert sum(bool(r.any()) for r in rows[:4]) == 3, "the block that adds nothing"


def test_a_compiled_model_is_read_as_it_would_be_without() -> None:
    from modpass.decode.example import tiny_decoder

    ids = torch.arange(10).reshape(1, 10)
    plain, model = tiny_decoder(True), tiny_decoder(True)
    model.load_state_dict(plain.state_dict())
    compiled = torch.compile(model, backend="eager")
    compiled(ids)
    for each in (plain, compiled):
        calibrate(each, [ids], score=loss_sensitivity, loss=lm_loss)
    assert torch.allclose(*[m.routed_blocks["blocks.1"].router.weight for m in (plain, model)])


def test_which_scores_take_a_gradient() -> None:
    assert [takes_gradient(s) for s in (lambda x, y: x, lambda x, y, z=1: x, lambda x, y, z: x)] == [False, False, True]


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (None, r"the score takes the gradient of a loss, and there is none; give loss=, of \(output, batch\)"),
        (lambda *_: 1.0, "the loss gave a float; a score that takes its gradient needs a scalar with one"),
        (lambda y, _: y, r"the loss gave a tensor of shape \[2, 16, \d+\]; a score that takes its gradient needs"),
        (lambda y, _: y.detach().sum(), r"the loss gave a tensor of shape \[\] without a gradient; a score that"),
    ],
)
def test_a_loss_without_a_gradient_is_refused(loss: Any, found: str) -> None:
    with pytest.raises(InputError, match=found):
        calibrate(copy.deepcopy(traced()), [tokens(2, 16)], score=loss_sensitivity, loss=loss)


def test_a_loss_that_does_not_depend_on_a_block_is_refused() -> None:
    for loss in (lambda y, _: (y * 0).sum(), lambda y, _: traced().get_parameter("embed.weight").sum() + 0 * y.sum()):
        with pytest.raises(
            InputError, match=r"the loss does not depend on what block 'blocks\.0' gives; give one of the"
        ):
            calibrate(copy.deepcopy(traced()), [tokens(2, 16)], score=loss_sensitivity, loss=loss)


@pytest.mark.parametrize(
    ("score", "found"),
    [
        (None, "score is None; it must be a function of a block's stream before and after, or of the gradient too"),
        (
            lambda x, y: (y - x).sum(-1).int(),
            r"score gave torch\.int32 for block 'blocks\.0'; it must be a floating-point",
        ),
        (
            lambda x, y: (y - x).sum(-1).numpy(),
            r"score gave ndarray for block 'blocks\.0'; it must be a floating-point",
        ),
    ],
)
def test_what_is_no_score_is_refused(score: Any, found: str) -> None:
    with pytest.raises(InputError, match=found):
        calibrate(copy.deepcopy(traced()), [tokens(2, 16)], score=score)


def test_a_score_may_be_a_module_or_a_builtin_and_write_to_what_it_gets() -> None:
    class Scored(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor, gradient: Tensor) -> Tensor:
            return loss_sensitivity(x, y, gradient)

    def written(x: Tensor, y: Tensor, gradient: Tensor) -> Tensor:
        found = loss_sensitivity(x, y, gradient)
        for t in (x, y, gradient):
            t.zero_()
        return found

    weights, ids = [], tokens(2, 16)
    for score in (loss_sensitivity, Scored(), written):
        model = copy.deepcopy(traced())
        calibrate(model, [ids], score=score, loss=lm_loss)
        weights.append(torch.stack([b.router.weight for b in model.routed_blocks.values()]))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    assert not takes_gradient(torch.dist), "a builtin that does not say what it takes"
