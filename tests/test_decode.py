"""Prefill and decode steps against the full forward; causal selection against the slow reference."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import modpass
from modpass.causal import causal_slots
from modpass.decode import decode_step, prefill
from modpass.errors import BlockError, InputError
from modpass.reference import Setting, causal_choice, routed_reference
from tests.decoders import CAUSAL, LENGTH, MASKED, causal, dense, full_forward, generated, ids_name
from tests.zoo import ZOO, Decoder, first, make, masked, tokens


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


# Causal selection


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("capacity", [0.125, 0.5, 1.0])
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_selection_equals_the_slow_reference(name: str, capacity: float, side: str) -> None:
    if side != "none" and name not in MASKED:
        pytest.skip("takes no padding mask")
    routed = causal(name, capacity)
    inputs = ZOO[name].inputs(3, LENGTH, side)
    keep, chosen = inputs.get("attention_mask"), dict[str, list[list[int]]]()
    with torch.no_grad(), modpass.recorded_choices() as choices:
        found = first(routed(**inputs))
    settings = {
        n: Setting(b.capacity, b.gate, b.router.weight, selection="causal") for n, b in routed.routed_blocks.items()
    }
    with torch.no_grad(), routed_reference(dense(name)[0], settings, keep, chosen) as reference:
        wanted = first(reference(**inputs))
    taken = {n: [[i for i in row if i < LENGTH] for row in c.tolist()] for n, c in choices.items()}
    assert taken == chosen
    assert any(len(row) < LENGTH for rows in chosen.values() for row in rows)
    rows = slice(None) if keep is None else keep.bool()
    assert relative(found[rows], wanted[rows]) < 1e-4


@pytest.mark.parametrize("name", CAUSAL)
def test_later_tokens_change_nothing_before_them_bit_for_bit(name: str) -> None:
    routed, ids = causal(name, 0.25), tokens(3, LENGTH)
    for t in (1, 9, 20):
        changed = torch.cat([ids[:, :t], tokens(3, LENGTH - t)], 1)
        assert torch.equal(full_forward(routed, ids)[:, :t], full_forward(routed, changed)[:, :t])


@pytest.mark.parametrize("name", CAUSAL)
def test_expert_choice_does_look_at_later_tokens(name: str) -> None:
    routed = modpass.mod_transform(dense(name)[0], 0.25, example_inputs=ZOO[name].example_inputs())
    ids, t = tokens(8, LENGTH), 12
    changed = torch.cat([ids[:, :t], tokens(8, LENGTH - t)], 1)
    assert relative(full_forward(routed, ids)[:, :t], full_forward(routed, changed)[:, :t]) > 1e-4


def test_gradients_flow_through_causal_selection_and_unused_slots_give_none() -> None:
    routed = causal("tril-buffer", 0.5)
    block = routed.routed_blocks["blocks.1"]
    with torch.no_grad():
        kept = block.router.weight.clone()
        block.router.weight.mul_(0.0)  # no token passes: every slot stays free
    logits = routed(tokens(2, LENGTH))
    logits.sum().backward()
    own = [p.grad for n, p in routed.named_parameters() if n.startswith("blocks.1.") and "router" not in n]
    assert all(g is None or (g == 0).all() for g in own)
    assert all(p.grad is None or p.grad.isfinite().all() for p in routed.parameters())
    routed.zero_grad()
    with torch.no_grad():
        block.router.weight.copy_(kept)


def test_the_slots_of_causal_selection_are_drawn_against_plain_python() -> None:
    for seed in range(50):
        g = torch.Generator().manual_seed(seed)
        S = int(torch.randint(1, 20, (1,), generator=g))
        k = int(torch.randint(1, S + 1, (1,), generator=g))
        scores = torch.randn(3, S, generator=g)
        found = [[i for i in row if i < S] for row in causal_slots(scores > 0, k).tolist()]
        assert found == [causal_choice(row, k / S) for row in scores.tolist()]


# Decode


@pytest.mark.parametrize("name", CAUSAL)
def test_dense_decode_equals_the_full_forward(name: str) -> None:
    model, ids = dense(name)[1], tokens(3, LENGTH)
    step = decode_step(model, batch=3, max_sequence=LENGTH, padding=False)
    state, found = step.state(), []
    with torch.no_grad():
        for t in range(LENGTH):
            outputs = step.advance({ids_name(model): ids[:, t : t + 1]}, torch.full((3,), t), state)
            found.append(next(iter(outputs.values())))
    assert relative(torch.cat(found, 1), full_forward(model, ids)) < 1e-4


@pytest.mark.parametrize("capacity", [0.125, 0.5])
@pytest.mark.parametrize("name", CAUSAL)
def test_prefill_and_routed_decode_equal_the_causal_forward(name: str, capacity: float) -> None:
    """Rows of different length, each at its own position; small capacities fill their caches on the way."""
    routed, ids = causal(name, capacity), tokens(4, LENGTH)
    logits, positions, state = generated(routed, ids, torch.tensor([11, 7, 4, 1]))
    wanted = full_forward(routed, ids)
    for row in range(4):
        assert relative(logits[row], wanted[row, positions[row]]) < 1e-4
    counts = torch.stack([v for n, v in state.items() if n.endswith(".count")])
    if capacity == 0.125:
        assert bool((counts == 3).any()), "no cache was full"


@pytest.mark.parametrize("capacity", [0.125, 0.5])
@pytest.mark.parametrize("name", MASKED)
def test_rows_padded_on_the_left_decode_like_the_full_forward(name: str, capacity: float) -> None:
    routed, ids = causal(name, capacity), tokens(4, LENGTH)
    mask = torch.ones(4, LENGTH, dtype=torch.int64)
    for row, pad in enumerate((0, 2, 5, 8)):
        mask[row, :pad] = 0
    logits, positions, _ = generated(routed, ids, torch.full((4,), 11), mask)
    wanted = full_forward(routed, ids, mask)
    for row in range(4):
        assert relative(logits[row], wanted[row, positions[row]]) < 1e-4


@pytest.mark.parametrize("name", ["llama", "alibi", "tril-buffer"])
def test_a_conditional_step_computes_what_the_masked_one_does(name: str) -> None:
    routed, ids = causal(name, 0.5), tokens(1, LENGTH)
    masked_logits, _, _ = generated(routed, ids, torch.tensor([3]))
    logits, _, state = generated(routed, ids, torch.tensor([3]), skipping="conditional")
    assert relative(logits, masked_logits) < 1e-6
    assert any(0 < int(v) < LENGTH for n, v in state.items() if n.endswith(".count"))


def test_batch_capacity_takes_the_best_rows_and_passes_the_others_by() -> None:
    routed, ids = causal("inner-rotary", 0.5), tokens(4, LENGTH)
    one = decode_step(routed, batch=4, max_sequence=LENGTH, padding=False, skipping="batch_capacity")
    seen: dict[str, Tensor] = {}
    hooks = [
        b.router.register_forward_hook(lambda m, i, o, n=n: seen.__setitem__(n, o[:, 0].detach()))
        for n, b in routed.routed_blocks.items()
    ]
    state = one.state()
    with torch.no_grad():
        for t in range(6):
            before = {n: v.clone() for n, v in state.items() if n.endswith(".count")}
            one.advance({"ids": ids[:, t : t + 1]}, torch.full((4,), t), state)
            for name, scores in seen.items():
                best = set(sorted(range(4), key=lambda row: -float(scores[row]))[:2])
                wanted = [int(row in best and float(scores[row]) > 0) for row in range(4)]
                assert (state[f"{name}.count"] - before[f"{name}.count"]).tolist() == wanted
    for hook in hooks:
        hook.remove()


def test_caches_hold_unrepeated_heads_and_routed_ones_only_their_capacity() -> None:
    step = decode_step(causal("llama", 0.25), batch=2, max_sequence=LENGTH)
    shapes = {c.name: c.shape for c in step.caches}
    assert shapes["model.layers.0.self_attn.key"] == (2, 2, LENGTH, 12)  # 2 of 4 heads
    assert shapes["model.layers.1.cache_0"] == (2, 2, LENGTH // 4, 12)
    whole = decode_step(dense("llama")[1], batch=2, max_sequence=LENGTH)
    share = sum(c.bytes for c in step.caches) / sum(c.bytes for c in whole.caches)
    assert share <= (1 + 0.25) / 2 + 1e-9


@pytest.mark.parametrize("options", [{"sliding_window": 5}, {"sliding_window": 5, "attn": "eager"}])
def test_sliding_windows_and_written_out_attention_decode(options: dict[str, object]) -> None:
    config = transformers.MistralConfig(
        vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=80, sliding_window=options["sliding_window"],
    )  # fmt: skip
    config._attn_implementation = options.get("attn", "sdpa")
    model = modpass.trace(transformers.MistralForCausalLM(config).eval())
    ids = tokens(2, LENGTH)
    logits, positions, _ = generated(model, ids, torch.tensor([9, 4]))
    wanted = full_forward(model, ids)
    for row in range(2):
        assert relative(logits[row], wanted[row, positions[row]]) < 1e-4


def test_parameters_are_shared_by_name_and_storage() -> None:
    model, routed = dense("llama")[0], causal("llama", 0.5)
    own = dict(model.named_parameters())
    step = decode_step(routed, batch=1, max_sequence=8)
    found = dict(step.named_parameters(remove_duplicate=False))
    shared = [n for n in own if n in found]
    assert len(shared) >= len(own) - 1  # a tied weight may be read by one of its names alone
    assert all(found[n].data_ptr() == own[n].data_ptr() for n in shared)


# Refusals


class Mixing(nn.Module):
    def __init__(self, mix: nn.Module) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(97, 16), mix, nn.Linear(16, 97)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.mix(self.embed(ids))
        mask = torch.full((ids.shape[1], ids.shape[1]), -math.inf).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=False)
        return self.head(x)


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.cumprod(1)


class Largest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.cummax(1).values


@pytest.mark.parametrize(("mix", "words"), [(Product(), "aten.cumprod"), (Largest(), "aten.cummax")])
def test_a_model_that_mixes_tokens_outside_attention_is_refused_by_the_operator(mix: nn.Module, words: str) -> None:
    with pytest.raises(BlockError, match=f"cannot be decoded: {words}"):
        decode_step(modpass.trace(Mixing(mix).eval(), (tokens(2, 11),)), batch=1, max_sequence=16)


@pytest.mark.parametrize("derive", [decode_step, prefill])
def test_a_model_that_sees_later_tokens_is_refused(derive: object) -> None:
    model = modpass.trace(make("encoder"), ZOO["encoder"].example_inputs())
    sizes = {"batch": 1, "max_sequence": 16} | ({"sequence": 4} if derive is prefill else {})
    with pytest.raises(BlockError, match="not causal: later tokens change what earlier ones compute"):
        derive(model, **sizes)  # type: ignore[operator]


def test_expert_choice_is_refused_with_the_way_out() -> None:
    routed = modpass.mod_transform(make("tril-buffer"), 0.5, example_inputs=ZOO["tril-buffer"].example_inputs())
    with pytest.raises(InputError, match=r"block 'blocks.1' selects by 'expert_choice', .* selection='causal'"):
        decode_step(routed, batch=1, max_sequence=16)
    for block in routed.routed_blocks.values():
        block.selection = "causal"
    decode_step(routed, batch=1, max_sequence=16)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": 0, "max_sequence": 8}, "batch is 0"),
        ({"batch": 1, "max_sequence": 2.5}, "max_sequence is 2.5"),
        ({"batch": 1, "max_sequence": 8, "skipping": "never"}, "skipping is 'never'; it must be one of 'masked'"),
    ],
)
def test_bad_sizes_are_refused_in_words(options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        decode_step(dense("tril-buffer")[1], **options)  # type: ignore[arg-type]


def test_a_prompt_longer_than_the_caches_is_refused() -> None:
    with pytest.raises(InputError, match="sequence is 9, more than the 8 tokens"):
        prefill(dense("tril-buffer")[1], batch=1, sequence=9, max_sequence=8)


def test_all_logits_of_a_prefill_equal_the_forward() -> None:
    model, inputs = dense("llama")[1], masked(2, 9, "none")
    part = prefill(model, batch=2, sequence=9, max_sequence=16, logits="all", padding=False)
    with torch.no_grad():
        outputs, _ = part.fill({"input_ids": inputs["input_ids"]})
    assert relative(outputs["logits"], full_forward(model, inputs["input_ids"])) < 1e-5


def test_the_head_of_a_prefill_reads_the_last_token_alone() -> None:
    heads = []
    for logits in ("last", "all"):
        part = prefill(dense("llama")[1], batch=1, sequence=9, max_sequence=16, logits=logits, padding=False)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            part.fill({"input_ids": tokens(1, 9)})
        heads.append(counter.get_total_flops())
    assert heads[1] - heads[0] == 2 * 8 * 48 * 97


def test_selection_causal_needs_attention_it_can_follow() -> None:
    class Linear(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.qkv = nn.Linear(width, 3 * width)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            causal_mask = torch.ones(x.shape[1], x.shape[1]).tril()
            return ((q @ k.transpose(1, 2)) * causal_mask) @ v

    routed = modpass.mod_transform(Decoder(Linear).eval(), 0.5, example_inputs=(tokens(2, 11),))
    with pytest.raises(BlockError, match=r"block 'blocks.1' cannot select causally: .* has no softmax"):
        routed.routed_blocks["blocks.1"].selection = "causal"
