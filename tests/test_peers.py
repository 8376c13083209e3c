"""What other tools make of the dense model, and the time in each block: small files that really run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modpass.bench import Case, Plan, Result, Row, Source, measure, run_case, runners_named
from modpass.bench.onnx_peers import check_same
from modpass.errors import VerificationError
from tests.bench_decoder import LAYERS, Counting, decoder

BLOCKS = [f"layers.{i}" for i in range(LAYERS)]


@pytest.mark.slow
class TestMeasured:
    @pytest.fixture(scope="class")
    def found(self) -> Result:
        model, example = decoder()
        plan = Plan(warmup=0, repeats=2, peers=True, blocks=True)
        case = Case("decoder", sequence=64, capacity=0.125)
        return run_case(case, runners_named(["torch", "onnxruntime"]), plan, Source(model, example, "decoder"))

    def test_the_plain_exporter_and_the_optimiser_take_turns_with_ours(self, found: Result) -> None:
        row = found.row("onnxruntime")
        assert row is not None
        assert row.status == "measured", row.reason
        assert {p.name: p.reason for p in row.peers} == {"torch.onnx.export": None, "onnxruntime.transformers": None}
        for peer in row.peers:
            assert peer.measurement is not None
            assert len(peer.measurement.timing.samples) == 2
            assert row.over(peer) is not None

    @pytest.mark.parametrize("runner", ["torch", "onnxruntime"])
    def test_each_block_has_its_time(self, found: Result, runner: str) -> None:
        row = found.row(runner)
        assert row is not None
        for measurement in (row.dense, row.routed):
            assert measurement is not None
            assert sorted(measurement.blocks) == ["", *BLOCKS]
            assert min(measurement.blocks.values()) > 0
            # Head and embedding are small here: nearly all of the time is told apart.
            assert measurement.blocks[""] < 0.6 * sum(measurement.blocks.values())

    def test_all_of_it_is_kept_in_the_json(self, found: Result) -> None:
        assert Result.from_json(found.to_json()) == found


class WithPeers(Counting):
    """A runner with one peer that runs and one that does not."""

    def peers(self, original: Any, inputs: Any, workdir: Path, dense: Any) -> Mapping[str, Callable[[], Any]]:
        def broken() -> Any:
            raise ImportError("no module of it\nat all")

        return {"fine": lambda: lambda: None, "broken": broken}


def row_of(plan: Plan, folder: Path) -> Row:
    models: Any = {"dense": None, "routed": None}
    original: Any = object()
    return measure(WithPeers(), models, {}, folder, plan, lambda *_: None, original)


def test_a_peer_that_cannot_run_does_not_cost_the_row(tmp_path: Path) -> None:
    row = row_of(Plan(0, 2, peers=True), tmp_path)
    assert row.status == "measured"
    assert [(p.name, p.reason) for p in row.peers] == [("fine", None), ("broken", "ImportError: no module of it")]


def test_peers_are_left_out_where_they_are_not_asked_for(tmp_path: Path) -> None:
    assert row_of(Plan(0, 2), tmp_path).peers == ()


@pytest.mark.parametrize("other", [np.full(3, 1.1), np.full(4, 1.0), np.full(3, np.nan)])
def test_a_peer_that_computes_something_else_is_refused(other: Any) -> None:
    check_same("peer", [np.full(3, 1.001)], [np.ones(3)])
    with pytest.raises(VerificationError, match="'peer' computes something else: its first output is off by"):
        check_same("peer", [other], [np.ones(3)])
