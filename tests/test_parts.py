"""Routing the attention or the MLP of a block alone, against the slow reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import modpass
from modpass.errors import BlockError, InputError
from modpass.reference import routed_reference
from tests.branch_reference import branch_reference
from tests.test_transform import keep_of, real, relative, set_blocks, settings_of
from tests.zoo import SIZES, ZOO, Decoder, InnerRotaryAttention, PreNorm, first, make, masked, tokens

QUIET = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 80}


def gptj() -> nn.Module:
    config = transformers.GPTJConfig(
        vocab_size=97, n_embd=48, n_layer=4, n_head=4, n_positions=64, rotary_dim=4, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPTJForCausalLM(config).eval()


def vit() -> nn.Module:
    return transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **QUIET)).eval()


def gemma2() -> nn.Module:
    config = transformers.Gemma2Config(vocab_size=97, num_key_value_heads=2, head_dim=12, **SIZES)
    return transformers.Gemma2ForCausalLM(config).eval()


@dataclass(frozen=True)
class Case:
    """A model, and the paths of the norm before each branch and of the branch, inside a block."""

    make: Callable[[], nn.Module]
    blocks: str
    paths: dict[str, tuple[str, str]]
    inputs: Callable[[int, int, str], dict[str, Any]] = masked


CASES = {
    "llama": Case(
        lambda: make("llama"),
        "model.layers",
        {"attention": ("input_layernorm", "self_attn"), "mlp": ("post_attention_layernorm", "mlp")},
    ),
    "gpt2": Case(lambda: make("gpt2"), "transformer.h", {"attention": ("ln_1", "attn"), "mlp": ("ln_2", "mlp")}),
    "vit": Case(
        vit,
        "layers",
        {"attention": ("layernorm_before", "attention"), "mlp": ("layernorm_after", "mlp")},
        lambda B, S, side: {"pixel_values": torch.randn(B, 3, 32, 32)},
    ),
    "hand-written": Case(
        lambda: make("tril-buffer"),
        "blocks",
        {"attention": ("norm1", "attn"), "mlp": ("norm2", "mlp")},
        ZOO["tril-buffer"].inputs,
    ),
    "parallel": Case(gptj, "transformer.h", {"attention": ("ln_1", "attn"), "mlp": ("ln_1", "mlp")}),
}


@cache
def pair(name: str, parts: modpass.Parts) -> tuple[nn.Module, modpass.RoutedModel]:
    torch.manual_seed(0)
    case = CASES[name]
    model = case.make()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0 if p.dim() > 1 and name in ("vit", "parallel") else 1.0)
    examples = case.inputs(2, 23, "none") if name == "hand-written" else None
    return model, modpass.mod_transform(model, 0.5, parts=parts, example_inputs=examples)


@pytest.mark.parametrize(
    ("capacity", "gate", "side"), [(0.01, "linear", "right"), (0.4, "sigmoid", "left"), (1.0, "unit", "none")]
)
@pytest.mark.parametrize("parts", ["attention", "mlp"])
@pytest.mark.parametrize("name", CASES)
def test_a_routed_branch_equals_the_slow_reference(
    name: str, parts: modpass.Parts, capacity: float, gate: str, side: str
) -> None:
    model, routed = pair(name, parts)
    case = CASES[name]
    assert list(routed.routed_blocks) == [f"{case.blocks}.1", f"{case.blocks}.3"]
    set_blocks(routed, capacity, gate)
    inputs = case.inputs(3, 19, side)
    keep = keep_of(name, inputs)
    branches = {n: tuple(f"{n}.{path}" for path in case.paths[parts]) for n in routed.routed_blocks}
    with torch.no_grad():
        found = real(first(routed(**inputs)), keep)
        dense = real(first(model(**inputs)), keep)
        with branch_reference(model, branches, settings_of(routed), keep) as reference:  # type: ignore[arg-type]
            wanted = real(first(reference(**inputs)), keep)
    assert relative(found, wanted) < 1e-4
    if capacity == 1.0:
        assert relative(found, dense) < 1e-5, "every token at a weight of 1 is the dense model"
    else:
        assert relative(found, dense) > 1e-3, "routing changed nothing"


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_norm_after_the_sum_belongs_to_the_routed_branch(side: str) -> None:
    """BERT: f(x) = norm(x + attention(x)) - x, as for a whole block."""
    model = make("bert")
    routed = modpass.mod_transform(model, 0.4, parts="attention")
    inputs = masked(3, 19, side)
    settings = {f"{n}.attention": s for n, s in settings_of(routed).items()}
    with torch.no_grad(), routed_reference(model, settings, inputs["attention_mask"]) as reference:
        wanted = real(first(reference(**inputs)), inputs["attention_mask"])
        found = real(first(routed(**inputs)), inputs["attention_mask"])
    assert relative(found, wanted) < 1e-4


def test_parameters_keep_their_dense_names() -> None:
    model, routed = pair("llama", "attention")
    dense, mine = model.state_dict(), routed.state_dict()
    assert set(mine) - set(dense) == {f"model.layers.{i}.router.weight" for i in (1, 3)}
    assert all(mine[n].data_ptr() == dense[n].data_ptr() for n in dense)
    assert routed.settings["parts"] == "attention"


def test_only_the_branch_lies_in_the_routed_body() -> None:
    bodies = {p: pair("llama", p)[1].routed_blocks["model.layers.1"].owned for p in ("attention", "mlp")}  # type: ignore[arg-type]
    assert all(path.startswith(("self_attn.", "input_layernorm.")) for path in bodies["attention"])
    assert all(path.startswith(("mlp.", "post_attention_layernorm.")) for path in bodies["mlp"])


def test_neighbouring_blocks_can_both_have_their_mlp_routed() -> None:
    model, _ = pair("vit", "mlp")
    routed = modpass.mod_transform(model, 0.4, parts="mlp", every=1)
    branches = {n: (f"{n}.layernorm_after", f"{n}.mlp") for n in routed.routed_blocks}
    inputs = CASES["vit"].inputs(3, 0, "none")
    assert len(branches) == 4
    with torch.no_grad(), branch_reference(model, branches, settings_of(routed)) as reference:
        assert relative(first(routed(**inputs)), first(reference(**inputs))) < 1e-4


def test_a_branch_with_norms_on_both_sides_is_routed() -> None:
    model = gemma2()
    branch = {"attention": "attention", "mlp": "mlp"}
    for parts in branch:
        routed = modpass.mod_transform(model, 1.0, parts=parts, gate="unit", every=1)  # type: ignore[arg-type]
        assert len(routed.routed_blocks) == 4
        inputs = masked(2, 17, "left")
        keep = inputs["attention_mask"]
        with torch.no_grad():
            assert relative(real(routed(**inputs).logits, keep), real(model(**inputs).logits, keep)) < 1e-5


def test_a_routed_branch_is_saved_and_loaded(tmp_path: Any) -> None:
    _, routed = pair("llama", "mlp")
    set_blocks(routed, 0.4, "linear")
    modpass.save_pretrained(routed, tmp_path / "m")
    loaded = modpass.load(tmp_path / "m")
    assert loaded.settings["parts"] == "mlp"
    inputs = masked(2, 15, "left")
    with torch.no_grad():
        assert torch.equal(first(loaded(**inputs)), first(routed.eval()(**inputs)))


@pytest.mark.parametrize("parts", ["attention", "mlp"])
def test_onnx_runtime_agrees_on_a_routed_branch(tmp_path: Any, parts: modpass.Parts) -> None:
    from modpass.exporters import FixedShape, export_onnx, verify

    _, routed = pair("llama", parts)
    set_blocks(routed, 0.4, "linear")
    export_onnx(routed, tmp_path / "m.onnx", FixedShape(batch=2, sequence=16))
    report = verify(routed, tmp_path / "m.onnx")
    report.check(1e-4, 1.0)
    assert set(report.choices) == {"model.layers.1", "model.layers.3"}


@pytest.mark.parametrize("parts", ["attention", "mlp"])
@pytest.mark.parametrize("name", ["llama", "parallel"])
def test_decode_steps_of_a_routed_branch_equal_the_full_forward(name: str, parts: modpass.Parts) -> None:
    from modpass.decode import decode_step

    B, S = 2, 12
    routed = modpass.mod_transform(CASES[name].make(), 0.5, parts=parts, selection="causal")
    step, ids = decode_step(routed, batch=B, max_sequence=S, padding=False), tokens(B, S)
    lengths = [cache.shape[2] for cache in step.caches]
    assert sorted(lengths) == [6] * 4 * (parts == "attention") + [12] * (4 if parts == "attention" else 8)
    state = step.state()
    with torch.no_grad():
        rows = [step.advance({"input_ids": ids[:, p : p + 1]}, torch.full((B,), p), state)["logits"] for p in range(S)]
        assert relative(torch.cat(rows, 1), routed(input_ids=ids).logits) < 1e-5


class OneResidual(nn.Module):
    """Attention and MLP side by side, joined before their one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.up, self.out = InnerRotaryAttention(48, 4), nn.Linear(48, 48), nn.Linear(96, 48)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.cat([self.attn(x), self.up(x).relu()], -1))


class TwoAttentions(PreNorm):
    def __init__(self) -> None:
        super().__init__(InnerRotaryAttention(48, 4), 48)
        self.more = InnerRotaryAttention(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.more(x)


class AttentionAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = InnerRotaryAttention(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


@pytest.mark.parametrize(
    ("block", "parts", "reason"),
    [
        (OneResidual, "attention", "its attention and its MLP are branches of one residual, and no terms of its sum"),
        (OneResidual, "mlp", "its attention and its MLP are branches of one residual"),
        (TwoAttentions, "attention", "it has 2 parts that could be its attention; route the whole block"),
        (AttentionAlone, "mlp", "it has no MLP, a branch with a product and without attention, as a residual of its"),
    ],
)
def test_a_part_that_is_no_residual_of_its_own_is_refused(block: type[nn.Module], parts: Any, reason: str) -> None:
    model = nn.Sequential(*(block() for _ in range(2)))
    with pytest.raises(BlockError, match=f"parts='{parts}': {reason}"):
        modpass.mod_transform(model, 0.5, parts=parts, example_inputs=(torch.randn(2, 9, 48),))
    assert len(modpass.find_blocks(model, (torch.randn(2, 9, 48),))) == 2


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(InputError, match="parts is 'heads'; it must be one of 'block', 'attention', 'mlp'"):
        modpass.mod_transform(Decoder(InnerRotaryAttention), parts="heads", example_inputs=(tokens(2, 9),))  # type: ignore[arg-type]
