"""Selection without TopK chooses exactly what a stable sort chooses, whatever the scores are."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import modpass
from modpass.bisect import TOPK_LIMIT, bisect_select, kth_largest
from modpass.exporters import FixedShape, build_engine, export_onnx, verify
from modpass.exporters.conversion import as_onnx
from modpass.exporters.lowering import lower
from modpass.exporters.manifest import Manifest, manifest_path
from modpass.exporters.onnx_session import open_session
from modpass.functional import rank_scores, select

NAN, INF, MAX = float("nan"), float("inf"), torch.finfo(torch.float32).max
SUBNORMAL, TINY = 2.0**-149, 2.0**-126
EDGES = [0.0, -0.0, 1.0, -1.0, SUBNORMAL, -SUBNORMAL, TINY, -TINY, MAX, -MAX, INF, -INF, NAN]


def bits(pattern: int) -> float:
    return float(np.array(pattern, np.uint32).view(np.float32))


def row(length: int) -> st.SearchStrategy[list[float]]:
    values = st.sampled_from(EDGES) | st.integers(0, 2**32 - 1).map(bits) | st.floats(-2.0, 2.0, width=16)
    return st.lists(values, min_size=length, max_size=length)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 24), st.data())
def test_the_choice_equals_a_stable_sort_for_every_float(S: int, data: st.DataObject) -> None:
    scores = torch.tensor(data.draw(st.lists(row(S), min_size=1, max_size=3)))
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=S, max_size=S))).expand_as(scores)
    k = data.draw(st.sampled_from([1, S]) | st.integers(1, S))
    ranked = rank_scores(scores, keep)
    assert torch.equal(bisect_select(ranked, k), select(ranked, k))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 24), st.data())
def test_the_kth_largest_is_found_to_the_last_bit(S: int, data: st.DataObject) -> None:
    scores = torch.tensor(data.draw(row(S))).nan_to_num(nan=0.0, posinf=INF, neginf=-INF)[None]
    k = data.draw(st.integers(1, S))
    assert kth_largest(scores, k).item() == scores.sort(descending=True).values[0, k - 1].item()


@pytest.mark.parametrize("value", [*EDGES, -INF], ids=str)
@pytest.mark.parametrize("k", [1, 3, 9])
def test_equal_scores_go_to_the_lowest_positions(value: float, k: int) -> None:
    ranked = rank_scores(torch.full((2, 9), value))
    assert bisect_select(ranked, k).tolist() == [list(range(k))] * 2


def test_padding_is_chosen_last_and_below_nan() -> None:
    ranked = rank_scores(torch.tensor([[NAN, 5.0, NAN, 7.0]]), torch.tensor([[True, False, True, True]]))
    assert [bisect_select(ranked, k).tolist()[0] for k in (1, 2, 3, 4)] == [[3], [0, 3], [0, 2, 3], [0, 1, 2, 3]]


class Selector(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, scores: Tensor) -> Tensor:
        return select(scores, self.k)


@pytest.mark.parametrize(("S", "k"), [(4096, TOPK_LIMIT + 1), (20_000, 20_000)])
def test_the_exported_form_has_no_topk_and_chooses_the_same_in_onnx_runtime(S: int, k: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    graph = lower(Selector(k), {"scores": torch.randn(2, S)}, 18, ["chosen"])
    assert "TopK" not in {n.op_type for n in graph.graph}
    ir.save(graph, tmp_path / "s.onnx")
    session = open_session(tmp_path / "s.onnx")
    x = torch.randn(2, S)
    real = torch.arange(S) < 3900
    for scores in (x, x.bfloat16().float(), x.new_zeros(2, S), x * 1e-43, rank_scores(x.log(), real.expand(2, S))):
        assert torch.equal(torch.from_numpy(session.run(None, {"scores": scores.numpy()})[0]), select(scores, k))


def test_at_the_limit_topk_stays() -> None:
    graph = lower(Selector(TOPK_LIMIT), {"scores": torch.randn(1, 4096)}, 18)
    assert [n.op_type for n in graph.graph].count("TopK") == 2


def encoder() -> modpass.RoutedModel:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(8, 1, 8, batch_first=True, norm_first=True) for _ in range(2)]
    example = (torch.randn(2, 9, 8),)
    model = modpass.mod_transform(
        nn.Sequential(*layers).eval(), (TOPK_LIMIT + 1) / 4096, every=1, example_inputs=example
    )
    for block in model.routed_blocks.values():
        nn.init.normal_(block.router.weight)
    return model


def test_export_says_that_it_bisects_and_onnx_runtime_and_tensorrt_take_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "modpass"):
        manifest = export_onnx(encoder(), tmp_path / "m.onnx", FixedShape(1, 4096))
    assert "block '0' selects k=3841 tokens, TensorRT's TopK at most 3840: exported as a bisection" in caplog.text
    assert {b.selector for b in manifest.routed_blocks.values()} == {"bisection"}
    assert Manifest.load(manifest_path(tmp_path / "m.onnx")).routed_blocks == manifest.routed_blocks
    verify(encoder(), tmp_path / "m.onnx").check()
    pytest.importorskip("tensorrt_rtx", reason="pip install 'modpass[tensorrt-rtx]'")
    build_engine(tmp_path / "m.onnx", tmp_path / "m.engine", progress=False)


def test_the_bisection_stays_float32_in_half_precision() -> None:
    graph, indices = as_onnx(encoder(), FixedShape(1, 4096), dtype="float16")
    for name in indices.values():
        pending, seen = [v for n in graph.graph for v in n.outputs if v.name == name], set()
        while pending:
            maker = pending.pop().producer()
            if maker is None or maker in seen:
                continue
            seen.add(maker)
            if maker.op_type == "ReduceSum" and "router" in str(maker.metadata_props):
                continue  # the scores themselves: behind them is the stream
            floats = [v for v in (*maker.inputs, *maker.outputs) if v is not None and v.dtype.is_floating_point()]
            assert all(v.dtype == ir.DataType.FLOAT for v in floats), maker
            pending += [v for v in maker.inputs if v is not None]
        assert sum(n.op_type == "ReduceSum" for n in seen) == 35
