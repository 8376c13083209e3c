"""Gradients, mixed precision, compilation and dropout."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing

import modpass
from modpass.reference import routed_reference
from tests.test_transform import keep_of, relative, routed_pair, set_blocks, settings_of, transform
from tests.zoo import ZOO, first, make, masked, tokens


@pytest.mark.parametrize("gate", ["linear", "sigmoid", "unit"])
@pytest.mark.parametrize("name", ["llama", "tril-buffer", "encoder-sbd"])
def test_gradients_equal_those_of_the_slow_reference(name: str, gate: str) -> None:
    model, routed = routed_pair(name)
    set_blocks(routed, 0.25, gate)
    inputs = ZOO[name].inputs(3, 14, "left")
    weight = torch.randn_like(first(routed(**inputs)).detach())
    if (keep := keep_of(name, inputs)) is not None:
        weight = weight * (keep if name == "llama" else keep.T).unsqueeze(-1)
    parameters = dict(routed.named_parameters())
    found = torch.autograd.grad((first(routed(**inputs)) * weight).sum(), list(parameters.values()), allow_unused=True)
    with routed_reference(model, settings_of(routed), keep) as reference:
        loss = (first(reference(**inputs)) * weight).sum()
        wanted = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    for n, a, b in zip(parameters, found, wanted, strict=True):
        assert (a is None) == (b is None), n
        if a is not None and b is not None:
            assert (a - b).abs().max() <= 1e-4 * max(1.0, float(b.abs().max())), n
    router = [n for n in parameters if n.endswith("router.weight")]
    trained = {n for n, g in zip(parameters, found, strict=True) if g is not None and g.abs().max() > 0}
    assert set(router) & trained == (set() if gate == "unit" else set(router))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twenty_adamw_steps_stay_finite_and_learn(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    routed = transform("tril-buffer", ZOO["tril-buffer"].make().to(dtype), 0.25).train()
    assert all(b.router.weight.dtype == torch.float32 for b in routed.routed_blocks.values())
    optimizer = torch.optim.AdamW(routed.parameters(), lr=3e-3)
    ids, losses = tokens(4, 24), []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(routed(ids=ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert all(p.isfinite().all() for p in routed.parameters())
    assert losses[-1] < losses[0] - 0.3


def test_casting_the_model_keeps_routers_in_float32() -> None:
    routed = transform("llama", make("llama"), 0.5)
    half = copy.deepcopy(routed).to(torch.bfloat16)
    assert half.model.norm.weight.dtype == torch.bfloat16
    assert all(b.router.weight.dtype == torch.float32 for b in half.routed_blocks.values())


def test_compiles_as_one_graph_and_does_not_recompile_for_one_shape() -> None:
    _, routed = routed_pair("llama")
    set_blocks(routed, 0.25, "linear")
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(routed, fullgraph=True, backend=counter)
    with torch.no_grad():
        for _ in range(20):
            inputs = masked(2, 16, "left")
            assert relative(compiled(**inputs).logits, routed(**inputs).logits) < 1e-5
    assert counter.frame_count == 1


@pytest.mark.slow
def test_inductor_computes_the_same() -> None:
    _, routed = routed_pair("inner-rotary")
    set_blocks(routed, 0.25, "linear")
    torch._dynamo.reset()
    ids = tokens(2, 16)
    with torch.no_grad():
        assert relative(torch.compile(routed, fullgraph=True)(ids=ids), routed(ids=ids)) < 1e-4


@pytest.mark.parametrize("name", ["tril-buffer", "bert", "encoder"])
def test_train_and_eval_switch_dropout_inside_the_graph(name: str) -> None:
    model = make(name)
    routed = transform(name, model, 0.5)
    inputs = ZOO[name].inputs(2, 16, "none")
    with torch.no_grad():
        calm = [first(routed(**inputs)) for _ in range(2)]
        routed.train()
        noisy = [first(routed(**inputs)) for _ in range(2)]
        routed.eval()
        again = first(routed(**inputs))
    assert torch.equal(calm[0], calm[1])
    assert torch.equal(calm[0], again)
    assert not torch.equal(noisy[0], noisy[1])


def test_attention_dropout_of_a_model_in_eval_mode_is_known_to_the_graph() -> None:
    routed = modpass.trace(make("bert"))
    rates = [m.rate for m in routed.modules() if type(m).__name__ == "AttentionDropout"]
    assert rates == [0.1] * 4
