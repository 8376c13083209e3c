"""The roofline: counted by hand, at both of its ends, and beside what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import modpass
from modpass.bench import Case, Result, Row, Source, Sweep
from modpass.bench.gpus import GPUS, Machine, machine_named
from modpass.bench.plan import Prediction, predict
from modpass.bench.traffic import costs
from modpass.errors import InputError
from tests.bench_decoder import LAYERS, VOCABULARY, WIDTH, decoder, layer_flops
from tests.commands import DECODER, Capture, fails, rows, run
from tests.sweeps import measured, result

FAST = Machine("fast memory", {"float32": 1e9}, 1e30, 1e9, "own")
SLOW = Machine("slow memory", {"float32": 1e30}, 1e9, 1e6, "own")


def test_operations_are_those_of_the_hand_formula() -> None:
    model, example = decoder()
    found = costs(modpass.trace(model, example), {"input_ids": torch.zeros(2, 16, dtype=torch.int64)})
    assert sum(c.flops for c in found) == 2 * (LAYERS * layer_flops(16) + 2 * 16 * WIDTH * VOCABULARY)


def test_bytes_are_operands_and_results() -> None:
    linear = modpass.trace(torch.nn.Linear(8, 4, bias=False), torch.ones(3, 8))
    (cost,) = costs(linear, {"input": torch.ones(3, 8)})
    assert (cost.flops, cost.bytes) == (2 * 3 * 8 * 4, 4 * (3 * 8 + 8 * 4 + 3 * 4))


class TestPredict:
    def predict(self, machine: Machine, **case: object) -> Prediction:
        model, example = decoder()
        settings = {"sequence": 64, "capacity": 0.25, **case}
        return predict(Case("decoder", **settings), Source(model, example, "decoder"), machine)  # type: ignore[arg-type]

    def test_where_memory_is_free_the_ratio_is_that_of_operations(self) -> None:
        found = self.predict(FAST)
        assert found.dense.seconds == pytest.approx(found.dense.flops / 1e9)
        assert found.dense.memory_bound == pytest.approx(0)
        routed = 2 * layer_flops(64) + 2 * layer_flops(16)
        assert found.routed.flops == routed + 2 * 64 * WIDTH * VOCABULARY

    def test_where_operations_are_free_it_is_that_of_bytes(self) -> None:
        found = self.predict(SLOW)
        assert found.dense.seconds == pytest.approx(found.dense.bytes / 1e9)
        assert found.dense.memory_bound == pytest.approx(1)

    def test_a_routed_block_keeps_its_share_of_the_cache(self) -> None:
        found = self.predict(SLOW, batch=2)
        assert found.dense.decode is not None
        assert found.routed.decode is not None
        whole = LAYERS * 2 * 2 * 64 * WIDTH * 4  # keys and values of two rows in float32
        assert found.dense.decode.cache_bytes == whole
        assert found.routed.decode.cache_bytes == whole * (2 + 2 * 0.25) / 4

    def test_half_precision_halves_what_is_read_and_held(self) -> None:
        model, example = decoder()
        case = Case("decoder", sequence=64, capacity=0.25, dtype="bfloat16")
        half = predict(case, Source(model.bfloat16(), example, "decoder"), GPUS["h200"])
        single = self.predict(GPUS["h200"])
        assert half.dense.decode is not None
        assert single.dense.decode is not None
        assert half.dense.decode.cache_bytes == single.dense.decode.cache_bytes / 2
        assert half.dense.weights == single.dense.weights / 2

    def test_one_row_skips_more_steps_than_many(self) -> None:
        def gain(batch: int) -> float:
            found = self.predict(SLOW, batch=batch)
            assert found.dense.decode is not None
            assert found.routed.decode is not None
            return found.dense.decode.seconds / found.routed.decode.seconds

        assert gain(1) > gain(8) > 1

    def test_what_cannot_be_decoded_says_why(self) -> None:
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        found = predict(Case("e", sequence=16), Source(model, (torch.randn(2, 6, 8),), "e"), FAST)
        assert found.dense.decode is None
        assert found.no_decode


class TestMachines:
    def test_figures_of_ones_own_come_before_the_data_sheet(self) -> None:
        machine = machine_named("h200", "bfloat16", flops=700e12)
        assert machine.peak("bfloat16") == 700e12
        assert machine.bandwidth == GPUS["h200"].bandwidth
        assert machine.source.endswith("with figures of your own")

    def test_unknown_names_and_dtypes_are_refused(self) -> None:
        with pytest.raises(InputError, match=r"no GPU is called 'h300'; there are: h200, h100.*--bandwidth"):
            machine_named("h300", "float16")
        with pytest.raises(InputError, match="no peak of own is known in float16; there is float32, or give --flops"):
            machine_named("own", "float32", 1e12, 1e9).peak("float16")

    def test_every_machine_names_its_source(self) -> None:
        assert all("NVIDIA" in machine.source for machine in GPUS.values())


class TestCommand:
    def test_it_prints_both_sides(self, capsys: Capture) -> None:
        out, err = run(capsys, "plan", DECODER, "--sequence", 64, "--capacity", 0.25)
        assert err == ""
        assert "1 × 64 tokens, float32, capacity 0.25, on H200 SXM" in out
        assert "NVIDIA H200 Tensor Core GPU, data sheet: 67 TFLOP/s, 4800 GB/s" in out
        (caches,) = rows(out, "caches of keys and values")
        assert caches[-1] == "1.60"

    def test_what_does_not_fit_is_told(self, capsys: Capture) -> None:
        out, _ = run(capsys, "plan", DECODER, "--sequence", 64, "--memory", 0.001, "--batch", 64)
        assert "dense does not fit: " in out

    def test_a_report_is_set_beside_the_prediction(self, tmp_path: Path, capsys: Capture) -> None:
        case = Case(DECODER, sequence=64, capacity=0.25)
        found: Result = result(case, measured([2.0] * 3, [1.0] * 3), Row("torch", "skipped", reason="x"))
        (tmp_path / "r.json").write_text(Sweep((found,)).to_json())
        machine = ["--gpu", "own", "--flops", 0.001, "--bandwidth", 1e15]
        out, err = run(capsys, "plan", DECODER, "--check", tmp_path / "r.json", *machine)
        assert err == ""
        (row,) = rows(out, "b1-s64")
        dense = LAYERS * layer_flops(64) + 2 * 64 * WIDTH * VOCABULARY
        routed = 2 * layer_flops(64) + 2 * layer_flops(16) + 2 * 64 * WIDTH * VOCABULARY
        assert row[1:5] == ["onnxruntime", "2.00", f"{dense / routed:.2f}", "2.00 [2.00, 2.00]"]

    @pytest.mark.parametrize(
        ("options", "code", "message"),
        [
            (["--gpu", "h300"], 1, "no GPU is called 'h300'"),
            (["--check", "none.json"], 1, "'none.json' cannot be read"),
            (["--check", "none.json", "--capacity", "0.5"], 2, "the report says how it was routed; leave it out"),
            ([], 1, "give a sequence"),
        ],
    )
    def test_wrong_options_are_refused(self, options: list[str], code: int, message: str, capsys: Capture) -> None:
        assert message in fails(capsys, code, "plan", DECODER, *options)
