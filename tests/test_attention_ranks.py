"""Fused attention of any rank, and under masks of numbers, reaches ONNX as PyTorch computes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modpass
from modpass.errors import VerificationError
from modpass.exporters import FixedShape, export_onnx, verify
from modpass.exporters.attention_ranks import ExportableAttention

INF = float("-inf")


@pytest.mark.parametrize(
    ("query", "key", "mask"),
    [
        pytest.param((5, 8), (7, 8), None, id="one sequence"),
        pytest.param((2, 5, 8), (2, 7, 8), (2, 5, 7), id="rows without heads"),
        pytest.param((2, 5, 8), (2, 7, 8), (5, 7), id="one mask for all rows"),
        pytest.param((2, 3, 5, 8), (2, 3, 7, 8), (2, 1, 5, 7), id="rows and heads"),
        pytest.param((2, 4, 3, 5, 8), (2, 4, 3, 7, 8), (4, 1, 5, 7), id="windows, rows and heads"),
        pytest.param((2, 4, 3, 5, 8), (2, 4, 3, 7, 8), (2, 1, 1, 5, 7), id="a mask of five dims"),
        pytest.param((1, 4, 3, 5, 8), (2, 4, 3, 7, 8), None, id="queries that broadcast"),
        pytest.param((5, 8), (2, 7, 8), None, id="queries of fewer dims"),
    ],
)
@pytest.mark.parametrize("numbers", [True, False])
def test_four_dims_compute_what_any_dims_do(
    query: tuple[int, ...], key: tuple[int, ...], mask: tuple[int, ...] | None, numbers: bool
) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(query), torch.randn(key), torch.randn(key)
    bias = None
    if mask is not None:
        seen = torch.rand(mask) > 0.5
        seen[..., 0, :] = False
        bias = torch.zeros(mask).masked_fill(~seen, INF) if numbers else seen
    wanted = F.scaled_dot_product_attention(q, k, v, bias)
    with ExportableAttention():
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted, atol=1e-6)


def test_grouped_heads_of_one_sequence_stay_heads() -> None:
    q, k = torch.randn(4, 5, 8), torch.randn(2, 5, 8)
    with ExportableAttention():
        found = F.scaled_dot_product_attention(q, k, k, None, 0.0, True, scale=0.5, enable_gqa=True)
    wanted = F.scaled_dot_product_attention(q, k, k, None, 0.0, True, scale=0.5, enable_gqa=True)
    assert torch.allclose(found, wanted, atol=1e-6)


class Block(nn.Module):
    """One head over ``[batch, sequence, width]``, without a dim for it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x_BSD: Tensor, mask_BSS: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x_BSD)).chunk(3, -1)
        x_BSD = x_BSD + F.scaled_dot_product_attention(q, k, v, attn_mask=mask_BSS)
        return x_BSD + F.relu(self.mlp(self.norm(x_BSD)))


class Headless(nn.Module):
    """Blocks of one head, under a mask of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x_BSD: Tensor, mask_BSS: Tensor) -> Tensor:
        for block in self.blocks:
            x_BSD = block(x_BSD, mask_BSS)
        return x_BSD


def test_attention_without_a_dim_for_heads_is_routed_and_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(2, 12, 8), torch.zeros(2, 12, 12)
    mask[0, 3], mask[1, :, 5:] = INF, INF
    routed = modpass.mod_transform(Headless().eval(), 0.5, example_inputs=(x, mask))
    export_onnx(routed, tmp_path / "m.onnx", FixedShape(2, 12))
    verify(routed, tmp_path / "m.onnx").check()
    session = ort.InferenceSession(tmp_path / "m.onnx")
    found = session.run(None, {"x_BSD": x.numpy(), "mask_BSS": mask.numpy()})[0]
    wanted = routed(x, mask).detach().numpy()
    assert np.allclose(found, wanted, atol=1e-5)


class Causal(nn.Module):
    """A decoder of one head under a mask of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, 8), nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSD, S = self.embed(ids_BS), ids_BS.shape[1]
        mask = torch.zeros(S, S).masked_fill(torch.ones(S, S).tril() == 0, INF)
        for block in self.blocks:
            x_BSD = block(x_BSD, mask)
        return x_BSD


def test_causal_selection_follows_attention_without_a_dim_for_heads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = torch.randint(11, (2, 10))
    routed = modpass.mod_transform(Causal().eval(), 0.25, selection="causal", example_inputs=(ids,))
    with torch.no_grad():
        whole, prefix = routed(ids), routed(ids[:, :7])
    k = routed.routed_blocks["blocks.1"].slots(7)
    assert torch.allclose(whole[:, :k], prefix[:, :k], atol=1e-6)
    export_onnx(routed, tmp_path / "m.onnx", FixedShape(2, 10))
    verify(routed, tmp_path / "m.onnx").check()


def test_a_shape_that_the_model_itself_cannot_run_is_told(tmp_path: Path) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4)

        def forward(self, x_BSD: Tensor) -> Tensor:
            return x_BSD + self.table(torch.arange(x_BSD.shape[1]))

    model = modpass.trace(Positions().eval(), (torch.randn(2, 5, 4),))
    export_onnx(model, tmp_path / "m.onnx", FixedShape(1, 9))
    with pytest.raises(VerificationError, match=r"fails in PyTorch at x_BSD \[1, 9, 4\], so .*: index out of range"):
        verify(model, tmp_path / "m.onnx")
