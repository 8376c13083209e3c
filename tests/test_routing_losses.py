"""Routing losses and statistics against plain Python, and in every kind of training loop."""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor

import modpass
from modpass.errors import InputError
from modpass.reference import reference_choice
from modpass.training import routing_losses, routing_stats, scalars
from tests.zoo import ZOO, Decoder, TrilAttention, first, make, masked, tokens


@cache
def traced(name: str) -> modpass.RoutedModel:
    return modpass.mod_transform(make(name), 0.25, predictor=True, example_inputs=ZOO[name].example_inputs())


def fresh(name: str) -> modpass.RoutedModel:
    return copy.deepcopy(traced(name)).train()


def calm(model: modpass.RoutedModel) -> modpass.RoutedModel:
    """In training mode, without dropout."""
    for module in model.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def lm_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def bce(logit: float, target: bool) -> float:
    p = 1 / (1 + math.exp(-logit))
    return -math.log(p if target else 1 - p)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# Values


def test_losses_equal_plain_python_and_leave_padding_out() -> None:
    model, inputs = fresh("llama"), masked(3, 14, "left")
    model(**inputs)
    keep = inputs["attention_mask"].bool().tolist()
    routers, predictors, squares = [], [], []
    for block in model.routed_blocks.values():
        assert block.last is not None
        found: list[list[float]] = [[], [], []]
        for scores, logits, real in zip(block.last.scores.tolist(), block.last.logits.tolist(), keep, strict=True):
            chosen = reference_choice(scores, 0.25, real)
            for i in range(14):
                if real[i]:
                    found[0].append(bce(scores[i], i in chosen))
                    found[1].append(bce(logits[i], i in chosen))
                    found[2].append(scores[i] ** 2)
        for parts, own in zip((routers, predictors, squares), found, strict=True):
            parts.append(mean(own))
    losses = routing_losses(model, router=0.5, predictor=2.0, z_loss=0.1)
    assert losses.router.item() == pytest.approx(mean(routers), rel=1e-4)
    assert losses.predictor.item() == pytest.approx(mean(predictors), rel=1e-4)
    assert losses.z_loss.item() == pytest.approx(mean(squares), rel=1e-4)
    wanted = 0.5 * mean(routers) + 2 * mean(predictors) + 0.1 * mean(squares)
    assert losses.total.item() == pytest.approx(wanted, rel=1e-4)


def test_padding_gets_no_gradient_from_the_losses() -> None:
    model, inputs = fresh("llama"), masked(3, 14, "right")
    model(**inputs)
    block = model.routed_blocks["model.layers.1"]
    assert block.last is not None
    (grad,) = torch.autograd.grad(routing_losses(model, router=1.0, z_loss=1.0).total, block.last.scores)
    real = inputs["attention_mask"].bool()
    assert (grad[~real] == 0).all()
    assert (grad[real] != 0).all()


def test_statistics_equal_plain_python() -> None:
    model, inputs = fresh("llama"), masked(3, 14, "left")
    model(**inputs)
    keep = inputs["attention_mask"].bool().tolist()
    for name, stats in routing_stats(model, bins=5).items():
        last = model.routed_blocks[name].last
        assert last is not None
        pairs = [
            (i, i in reference_choice(scores, 0.25, real), logits[i] > 0)
            for scores, logits, real in zip(last.scores.tolist(), last.logits.tolist(), keep, strict=True)
            for i in range(14)
            if real[i]
        ]
        both = sum(t and s for _, t, s in pairs)
        assert stats.share == pytest.approx(mean([float(t) for _, t, _ in pairs]))
        assert stats.precision == pytest.approx(both / sum(s for *_, s in pairs) if any(s for *_, s in pairs) else 1.0)
        assert stats.recall == pytest.approx(both / sum(t for _, t, _ in pairs))
        assert stats.accuracy == pytest.approx(mean([float(t == s) for _, t, s in pairs]))
        assert sum(stats.counts) == len(pairs)
        assert len(stats.edges) == 6
        at = [[float(t) for i, t, _ in pairs if i == place] for place in range(14)]
        assert stats.positions == pytest.approx([mean(a) if a else 0.0 for a in at])
    numbers = scalars(routing_stats(model))
    assert numbers["routing/share"] == pytest.approx(
        mean([v for n, v in numbers.items() if n.endswith(".1/share") or n.endswith(".3/share")])
    )


def test_under_causal_selection_the_target_is_still_the_top_k() -> None:
    model, ids = fresh("tril-buffer"), tokens(2, 16)
    model.use_causal().eval()
    model(ids)
    for name, stats in routing_stats(model).items():
        last = model.routed_blocks[name].last
        assert last is not None
        assert not last.scores.requires_grad, "an evaluation would keep its activations"
        chosen = [reference_choice(row, 0.25) for row in last.scores.tolist()]
        right = [
            (i in c) == (v > 0) for c, row in zip(chosen, last.logits.tolist(), strict=True) for i, v in enumerate(row)
        ]
        assert stats.accuracy == pytest.approx(mean([float(r) for r in right]))


def test_the_routers_weight_is_zero_by_default_only_where_a_predictor_decides() -> None:
    model, ids = fresh("tril-buffer"), tokens(2, 16)
    model(ids)
    losses = routing_losses(model)
    assert losses.total.item() == pytest.approx(losses.predictor.item())
    for block in model.routed_blocks.values():
        block.predictor = None
    model(ids)
    losses = routing_losses(model)
    assert losses.total.item() == pytest.approx(0.01 * losses.router.item())


@pytest.mark.parametrize("function", [routing_losses, routing_stats])
def test_what_has_no_routing_is_refused(function: Any) -> None:
    with pytest.raises(InputError, match=r"Linear has no routed block; make it with modpass\.mod_transform"):
        function(torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"block 'blocks\.1' has not run yet; call the model first"):
        function(fresh("tril-buffer"))


# Gradients


def test_the_predictors_loss_leaves_the_trunks_gradients_bit_identical() -> None:
    model, ids = calm(fresh("tril-buffer")), tokens(2, 16)
    lm_loss(model(ids), ids).backward()
    alone = gradients(model)
    model.zero_grad()
    logits = model(ids)
    (lm_loss(logits, ids) + routing_losses(model).total).backward()
    together = gradients(model)
    trunk = [n for n in together if ".predictor." not in n]
    assert set(alone) == set(trunk)
    assert all(torch.equal(alone[n], together[n]) for n in trunk)
    assert all(together[n].abs().max() > 0 for n in set(together) - set(trunk))
    assert len(set(together) - set(trunk)) == 8


def test_the_routers_loss_reaches_the_trunk() -> None:
    model, ids = fresh("tril-buffer"), tokens(2, 16)
    model(ids)
    routing_losses(model, router=1.0).router.backward()
    assert gradients(model)["embed.weight"].abs().max() > 0


@pytest.mark.parametrize("selection", ["expert_choice", "stochastic"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_checkpointing_gives_the_same_choices_and_gradients(selection: str, dropout: float) -> None:
    model, ids, found = fresh("tril-buffer"), tokens(3, 16), []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    for checkpoint in (False, True):
        model.zero_grad()
        for block in model.routed_blocks.values():
            block.selection, block.checkpoint = selection, checkpoint
        torch.manual_seed(3)
        with modpass.recorded_choices() as choices:
            loss = lm_loss(model(ids), ids) + routing_losses(model, router=0.1).total
            before = {n: c.clone() for n, c in choices.items()}
            loss.backward()
        assert all(torch.equal(choices[n], before[n]) for n in before), "the choice was made again"
        found.append(gradients(model))
    assert set(found[0]) == set(found[1])
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


def kept(model: modpass.RoutedModel, ids: Tensor) -> int:
    """How many numbers a forward keeps for the backward pass."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids)
    return sum(sizes)


def test_checkpointing_keeps_less() -> None:
    ids = tokens(2, 16)
    example = ZOO["tril-buffer"].example_inputs()
    plain = modpass.mod_transform(make("tril-buffer"), 1.0, every=1, example_inputs=example).train()
    saving = modpass.mod_transform(make("tril-buffer"), 1.0, every=1, example_inputs=example, checkpoint=True).train()
    assert kept(saving, ids) < 0.5 * kept(plain, ids)


# Loops


def test_compiled_as_one_graph_it_gives_the_same_losses_and_gradients() -> None:
    model, ids = calm(fresh("tril-buffer")), tokens(2, 16)
    model.use_causal()
    loss = lm_loss(model(ids), ids) + routing_losses(model, router=0.1, z_loss=0.01).total
    loss.backward()
    wanted = gradients(model)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(3):
        model.zero_grad()
        found = lm_loss(compiled(ids), ids) + routing_losses(compiled, router=0.1, z_loss=0.01).total
        found.backward()
        assert found.item() == pytest.approx(loss.item(), rel=1e-5)
        assert all(torch.allclose(g, wanted[n], atol=1e-6) for n, g in gradients(model).items())
    assert counter.frame_count == 1
    assert set(gradients(model)) == set(wanted)
    assert routing_stats(compiled) == routing_stats(model)


@pytest.mark.slow
def test_a_whole_training_step_compiles_as_one_graph() -> None:
    model, ids = calm(fresh("tril-buffer")), tokens(2, 16)
    for block in model.routed_blocks.values():
        block.checkpoint = True

    def loss_of(ids: Tensor) -> Tensor:
        return lm_loss(model(ids), ids) + routing_losses(model, router=0.1).total

    loss_of(ids).backward()
    wanted = gradients(model)
    model.zero_grad()
    torch._dynamo.reset()
    torch.compile(loss_of, fullgraph=True, backend="aot_eager")(ids).backward()
    assert all(torch.allclose(g, wanted[n], atol=1e-6) for n, g in gradients(model).items())


def test_accumulated_gradients_equal_those_of_the_whole_batch() -> None:
    model, ids = calm(fresh("tril-buffer")), tokens(4, 16)
    (lm_loss(model(ids), ids) + routing_losses(model, router=0.1).total).backward()
    wanted = gradients(model)
    model.zero_grad()
    for part in ids.chunk(2):
        ((lm_loss(model(part), part) + routing_losses(model, router=0.1).total) / 2).backward()
    assert all(torch.allclose(g, wanted[n], atol=1e-6) for n, g in gradients(model).items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["tril-buffer", "llama"])
def test_autocast_and_a_gradient_scaler_train(name: str, dtype: torch.dtype) -> None:
    model, ids = fresh(name), tokens(4, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=dtype == torch.float16)
    losses = []
    for _ in range(8):
        with torch.autocast("cpu", dtype):
            logits = first(model(ids) if name == "tril-buffer" else model(input_ids=ids))
            losses.append(lm_loss(logits, ids) + routing_losses(model, router=0.1).total)
        assert routing_losses(model).router.dtype == torch.float32
        optimizer.zero_grad()
        scaler.scale(losses[-1]).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(p.isfinite().all() for p in model.parameters())
    assert losses[-1].item() < losses[0].item() - 0.3
    assert len(scaler.state_dict()) == 0 or scaler.get_scale() >= 1024, "a step was skipped"


def test_two_hundred_bfloat16_steps_stay_finite_from_routers_a_hundred_times_too_large() -> None:
    torch.manual_seed(1)
    model = modpass.mod_transform(
        Decoder(TrilAttention, layers=2, width=32).to(torch.bfloat16),
        0.25,
        predictor=True,
        example_inputs=(tokens(2, 12),),
    ).train()
    with torch.no_grad():
        for block in model.routed_blocks.values():
            block.router.weight.mul_(100)
    optimizer, ids = torch.optim.AdamW(model.parameters(), lr=1e-3), tokens(4, 16)
    for _ in range(200):
        loss = lm_loss(model(ids), ids) + routing_losses(model, router=0.01, z_loss=1e-3).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.isfinite()
        assert all(p.isfinite().all() for p in model.parameters())
