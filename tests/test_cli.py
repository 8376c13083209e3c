"""The command line: what each command prints and writes."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
import torch
from safetensors.torch import load_file

import modpass
from tests.bench_decoder import Decoder
from tests.commands import DECODER, Capture, rows, run
from tests.zoo import make


@pytest.fixture
def saved(tmp_path: Path, capsys: Capture) -> Path:
    run(capsys, "transform", DECODER, tmp_path / "saved", "--capacity", 0.25)
    return tmp_path / "saved"


def test_inspect_shows_a_row_for_each_block(capsys: Capture) -> None:
    out, err = run(capsys, "inspect", "tests.commands:biased")
    assert err == ""
    found = rows(out, "blocks.")
    assert [row[:4] for row in found] == [[f"blocks.{i}", "PreNorm", "[B, S, 48]", "18,960"] for i in range(4)]
    assert all(row[4] == "attention, mlp" for row in found)
    assert all("dims 1, 2 at the chosen tokens" in row[5] for row in found)
    assert all(int(row[6].partition(":")[0]) > 3 and "repeat" in row[6] for row in found)
    assert "4 blocks can be routed, 0 refused; 85,248 parameters, 75,840 of them in blocks that can be routed" in out


def test_inspect_gives_the_reason_of_each_refusal(capsys: Capture) -> None:
    out, _ = run(capsys, "inspect", "tests.commands:mixed")
    refused = [line for line in out.splitlines() if "RunningSum" in line]
    assert len(refused) == 2
    assert all("layers.1" in refused[0] and "cumsum" in line for line in refused)
    assert "2 blocks can be routed, 2 refused" in out
    assert "layers.0" in out


def test_inspect_gives_the_branch_of_a_refused_block_that_can_be_routed(capsys: Capture) -> None:
    out, _ = run(capsys, "inspect", "tests.commands:windowed")
    assert [row[:3] for row in rows(out, "0 ") if len(row) > 1] == [["0", "Windowed", "mlp"]]
    assert "--parts mlp routes that branch of 3 of the 3 refused blocks" in out


def test_inspect_shows_the_routing_of_a_saved_model(saved: Path, capsys: Capture) -> None:
    out, _ = run(capsys, "inspect", saved, "--factory", DECODER)
    assert rows(out, "layers.") == [[f"layers.{i}", "0.25", "linear", "expert_choice", "block", "32"] for i in (1, 3)]
    assert "2 blocks are routed; 37,440 parameters, 64 of them in routers" in out


def test_transform_gives_each_block_a_predictor(tmp_path: Path, capsys: Capture) -> None:
    run(capsys, "transform", DECODER, tmp_path / "m", "--predictor")
    out, _ = run(capsys, "inspect", tmp_path / "m", "--factory", DECODER)
    assert "2 blocks are routed; 37,986 parameters, 64 of them in routers, 546 in predictors" in out


def test_transform_writes_a_model_that_loads(saved: Path) -> None:
    routed = modpass.load(saved, model=Decoder())
    assert {n: b.capacity for n, b in routed.routed_blocks.items()} == {"layers.1": 0.25, "layers.3": 0.25}


def test_transform_follows_its_options(tmp_path: Path, capsys: Capture) -> None:
    options = [
        "--blocks",
        "layers.0,layers.2",
        "--blocks",
        "layers.3",
        "--gate",
        "unit",
        "--selection",
        "stochastic",
    ]
    out, err = run(capsys, "transform", DECODER, tmp_path / "m", *options, "--dtype", "float32")
    assert err == ""
    assert "routed 3 blocks (capacity): layers.0 (0.125), layers.2 (0.125), layers.3 (0.125)" in out
    settings = json.loads((tmp_path / "m" / "modpass.json").read_text())["settings"]
    assert settings["capacity"] == {"layers.0": 0.125, "layers.2": 0.125, "layers.3": 0.125}
    assert (settings["gate"], settings["selection"]) == ("unit", "stochastic")


def test_transform_is_reproducible_by_its_seed(tmp_path: Path, capsys: Capture) -> None:
    def weights(name: str, seed: int) -> bytes:
        run(capsys, "transform", DECODER, tmp_path / name, "--seed", seed)
        return (tmp_path / name / "model.safetensors").read_bytes()

    assert weights("a", 1) == weights("b", 1)
    assert weights("c", 2) != weights("a", 1)


def test_export_writes_and_compares(tmp_path: Path, capsys: Capture) -> None:
    out, err = run(capsys, "export", DECODER, tmp_path / "m.onnx", "--sequence", 32, "--batch", 2, "--capacity", 0.25)
    assert err == ""
    assert "layers.1: 8 of 32 tokens (capacity 0.25)" in out
    assert "token choices equal: 100.00%" in out
    assert json.loads((tmp_path / "m.onnx.json").read_text())["parity"]["choices"] == {
        "layers.1": 1.0,
        "layers.3": 1.0,
    }
    assert ort.InferenceSession(tmp_path / "m.onnx").get_inputs()[0].shape == [2, 32]


def test_export_keeps_the_settings_of_a_saved_model(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    run(capsys, "export", saved, tmp_path / "m.onnx", "--sequence", 16, "--factory", DECODER, "--no-verify")
    manifest = json.loads((tmp_path / "m.onnx.json").read_text())
    assert {n: b["k"] for n, b in manifest["routed_blocks"].items()} == {"layers.1": 4, "layers.3": 4}
    assert manifest.get("parity") is None


def test_export_of_the_dense_model_routes_nothing(tmp_path: Path, capsys: Capture) -> None:
    out, _ = run(capsys, "export", DECODER, tmp_path / "m.onnx", "--sequence", 16, "--dense")
    assert "tokens (capacity" not in out
    assert json.loads((tmp_path / "m.onnx.json").read_text())["routed_blocks"] == {}


@pytest.mark.parametrize(("dtype", "compared"), [("float16", True), ("bfloat16", False)])
def test_export_in_half_precision(dtype: str, compared: bool, tmp_path: Path, capsys: Capture) -> None:
    out, _ = run(capsys, "export", DECODER, tmp_path / "m.onnx", "--sequence", 16, "--dtype", dtype)
    assert json.loads((tmp_path / "m.onnx.json").read_text())["dtype"] == dtype
    assert ("ONNX Runtime beside PyTorch" in out) == compared
    assert ("not compared with PyTorch: ONNX Runtime cannot run bfloat16" in out) != compared


def test_a_file_that_computes_something_else_fails(tmp_path: Path, capsys: Capture, monkeypatch: Any) -> None:
    module = importlib.import_module("modpass.exporters.verify")  # the package has a function of this name
    monkeypatch.setattr(module, "BOUNDS", {"float32": (1e-12, 1.0)})
    _, err = run(capsys, "export", DECODER, tmp_path / "m.onnx", "--sequence", 16, code=1)
    assert err.startswith("modpass: output 'output' is off by ")
    assert err.count("\n") == 1


def test_bench_measures_and_writes_a_report(tmp_path: Path, capsys: Capture) -> None:
    options = ["--sequence", 64, "--capacity", 0.25, "--repeats", 2, "--warmup", 0, "--runner", "torch"]
    out, err = run(capsys, "bench", DECODER, *options, "--out", tmp_path / "report")
    assert err == ""
    assert re.search(r"^ *torch +-?\d+% +\d+\.\d+×", out, re.M)
    assert sorted(p.suffix for p in (tmp_path / "report").iterdir()) == ["", ".html", ".json", ".md"]
    case = json.loads((tmp_path / "report" / "tests.bench_decoder-decoder.json").read_text())["results"][0]["case"]
    assert (case["sequence"], case["capacity"], case["every"]) == (64, 0.25, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_bench_fails_where_nothing_could_run(capsys: Capture) -> None:
    options = ["--sequence", 32, "--runner", "torch-cuda"]
    out, err = run(capsys, "bench", DECODER, *options, code=1)
    assert "no NVIDIA GPU" in out
    assert err == "modpass: no runner could run here, see the table\n"


@pytest.mark.slow
def test_a_hugging_face_folder_goes_all_the_way(tmp_path: Path, capsys: Capture) -> None:
    make("llama").save_pretrained(tmp_path / "llama")  # type: ignore[operator]
    run(capsys, "transform", tmp_path / "llama", tmp_path / "routed", "--capacity", 0.5)
    out, _ = run(capsys, "export", tmp_path / "routed", tmp_path / "m.onnx", "--sequence", 24)
    assert "model.layers.3: 12 of 24 tokens (capacity 0.5)" in out
    out, _ = run(capsys, "bench", tmp_path / "routed", "--sequence", 24, "--repeats", 1, "--runner", "torch")
    assert "capacity 0.5" in out


def test_transform_loads_weights_in_the_dtype_asked_for(tmp_path: Path, capsys: Capture) -> None:
    make("bert").save_pretrained(tmp_path / "bert")  # type: ignore[operator]
    run(capsys, "transform", tmp_path / "bert", tmp_path / "routed", "--dtype", "bfloat16")
    stored = load_file(tmp_path / "routed" / "model.safetensors")
    kept = {name for name, tensor in stored.items() if tensor.dtype == torch.float32}
    assert kept == {"encoder.layer.1.router.weight", "encoder.layer.3.router.weight"}
    assert torch.bfloat16 in {tensor.dtype for tensor in stored.values()}


@pytest.mark.slow
def test_from_a_model_to_an_engine(tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("tensorrt_rtx")
    run(capsys, "export", DECODER, tmp_path / "m.onnx", "--sequence", 64, "--dtype", "float16")
    options = ["--compute-capability", "8.6", "--optimization-level", 0, "--workspace", 256]
    out, _ = run(capsys, "build", tmp_path / "m.onnx", tmp_path / "m.engine", *options)
    assert "tensorrt-rtx, compute capability 8.6) in " in out
    manifest = json.loads((tmp_path / "m.engine.json").read_text())
    assert manifest["kind"] == "engine"
    assert manifest["bytes"] == (tmp_path / "m.engine").stat().st_size
