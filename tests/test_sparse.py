"""Sparse attention that picks its keys by a score of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import modpass
from modpass.errors import BlockError
from modpass.exporters import FixedShape, export_onnx, verify
from modpass.reference import Setting, routed_reference
from tests.decoders import LENGTH, full_forward, generated
from tests.test_transform import relative
from tests.zoo import Decoder, tokens


class Picking(nn.Module):
    """Attention to the ``budget`` keys ranked highest; ``leak``: their places are used as numbers too."""

    def __init__(self, width: int, heads: int, budget: int, causal: bool = True, leak: bool = False) -> None:
        super().__init__()
        self.heads, self.budget, self.causal, self.leak = heads, budget, causal, leak
        self.qkv, self.out, self.index = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        B, S, D = x.shape
        q, k, v = (t.view(B, S, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        iq, ik = self.index(x).chunk(2, -1)
        scores = iq @ ik.transpose(1, 2)
        if self.causal:
            later = torch.arange(S)[None, :] > torch.arange(S)[:, None]
            scores = scores.masked_fill(later, float("-inf"))
        picked = scores.topk(min(self.budget, S), dim=-1).indices
        hidden = picked.new_ones(B, S, S, dtype=torch.bool).scatter(-1, picked, False)
        if self.causal:
            hidden = hidden | later
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~hidden[:, None])
        y = y.transpose(1, 2).reshape(B, S, D)
        return self.out(y + picked[..., :1] if self.leak else y)


@pytest.mark.parametrize("budget", [3, 64], ids=["few keys", "more than there are"])
@pytest.mark.parametrize("causal", [True, False])
def test_keys_are_picked_among_those_of_the_chosen_tokens(budget: int, causal: bool) -> None:
    model = Decoder(lambda w, h: Picking(w, h, budget, causal)).eval()
    routed = modpass.mod_transform(model, 0.5, example_inputs=(tokens(2, 19),))
    assert len(routed.routed_blocks) == 2
    settings = {n: Setting(0.5, "linear", b.router.weight) for n, b in routed.routed_blocks.items()}
    for S in (19, 8, 2):
        ids = tokens(3, S)
        with torch.no_grad(), routed_reference(model, settings) as reference:
            wanted = reference(ids)
        with torch.no_grad():
            assert relative(routed(ids), wanted) < 1e-4


def test_the_budget_shrinks_with_the_tokens_in_a_fixed_graph(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = Decoder(lambda w, h: Picking(w, h, 6)).eval()
    routed = modpass.mod_transform(model, 0.25, example_inputs=(tokens(2, 19),))
    export_onnx(routed, tmp_path / "m.onnx", FixedShape(2, 16))
    report = verify(routed, tmp_path / "m.onnx").check()
    assert set(report.choices.values()) == {1.0}


def test_a_place_that_is_used_as_a_number_is_refused() -> None:
    model = Decoder(lambda w, h: Picking(w, h, 6, leak=True)).eval()
    with pytest.raises(BlockError, match=r"aten\.topk\.default runs along the sequence \(node topk\)"):
        modpass.mod_transform(model, 0.5, example_inputs=(tokens(2, 19),))


def test_a_budget_that_keeps_the_first_tokens_is_no_mask_of_keys() -> None:
    class Cut(Picking):
        def forward(self, x: Tensor) -> Tensor:
            first = x[:, : min(self.budget, x.shape[1])]
            return super().forward(x) + first.mean(1, keepdim=True)

    with pytest.raises(BlockError, match="takes the sequence apart"):
        modpass.mod_transform(Decoder(lambda w, h: Cut(w, h, 6)).eval(), 0.5, example_inputs=(tokens(2, 19),))


@pytest.mark.parametrize("budget", [3, 64], ids=["few keys", "more than there are"])
def test_decode_follows_picked_keys(budget: int) -> None:
    """Dense and routed; the routed model is also what the slow reference makes of the dense one."""
    model, ids = Decoder(lambda w, h: Picking(w, h, budget)).eval(), tokens(3, LENGTH)
    dense = modpass.trace(model, (tokens(2, 19),))
    routed = modpass.mod_transform(model, 0.5, selection="causal", example_inputs=(tokens(2, 19),))
    for block in routed.routed_blocks.values():
        block.max_sequence = LENGTH
        torch.nn.init.normal_(block.router.weight)
    settings = {n: Setting(0.5, "linear", b.router.weight, selection="causal") for n, b in routed.routed_blocks.items()}
    with torch.no_grad(), routed_reference(model, settings) as reference:
        assert relative(full_forward(routed, ids), reference(ids)) < 1e-4
    for whole in (dense, routed):
        logits, positions, _ = generated(whole, ids, torch.tensor([9, 4, 1]))
        wanted = full_forward(whole, ids)
        for row in range(3):
            assert relative(logits[row], wanted[row, positions[row]]) < 1e-4
