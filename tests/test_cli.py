"""The command line: what each command prints and writes, and every failure by its text and exit code."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
import torch
import typer
from safetensors.torch import load_file
from torch import Tensor, nn

import modpass
from modpass.cli import app, main
from modpass.errors import ModpassError
from tests.bench_decoder import Decoder
from tests.zoo import make

DECODER = "tests.bench_decoder:decoder"
ROOT = Path(__file__).parents[1]
Capture = pytest.CaptureFixture[str]

# Factories that the commands are given


class RunningSum(nn.Module):
    """A block that mixes tokens in a way that no choice of tokens follows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).cumsum(1)


def mixed() -> tuple[nn.Module, dict[str, Tensor]]:
    model = Decoder().eval()
    model.layers = nn.ModuleList([model.layers[0], RunningSum(), model.layers[1], RunningSum()])
    return model, {"input_ids": torch.arange(22).view(2, 11)}


def biased() -> tuple[nn.Module, dict[str, Tensor]]:
    return make("alibi"), {"ids": torch.arange(22).view(2, 11)}


def broken() -> nn.Module:
    raise ZeroDivisionError("no such\nnumber")


def interrupted() -> nn.Module:
    raise KeyboardInterrupt


def refused() -> nn.Module:
    raise ModpassError("the sentence")


def sleepy() -> nn.Module:
    print("ready", flush=True)
    time.sleep(60)
    raise AssertionError


def run(capsys: Capture, *arguments: Any, code: int = 0) -> tuple[str, str]:
    """Run a command in this process; its output and error stream."""
    capsys.readouterr()
    found = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert found == code, err
    return out, err


def rows(table: str, start: str) -> list[list[str]]:
    """The cells of those rows of a printed table that begin so."""
    lines = [line.strip("│ ") for line in table.splitlines()]
    return [[cell.strip() for cell in line.split("│")] for line in lines if line.startswith(start)]


def fails(capsys: Capture, code: int, *arguments: Any) -> str:
    """The one line that a failing command prints on the error stream."""
    out, err = run(capsys, *arguments, code=code)
    assert out == ""
    assert err.startswith("modpass: ")
    assert err.count("\n") == 1, err
    return err


@pytest.fixture
def saved(tmp_path: Path, capsys: Capture) -> Path:
    run(capsys, "transform", DECODER, tmp_path / "saved", "--capacity", 0.25)
    return tmp_path / "saved"


# Commands


def test_inspect_shows_a_row_for_each_block(capsys: Capture) -> None:
    out, err = run(capsys, "inspect", "tests.test_cli:biased")
    assert err == ""
    found = rows(out, "blocks.")
    assert [row[:4] for row in found] == [[f"blocks.{i}", "PreNorm", "[B, S, 48]", "18,960"] for i in range(4)]
    assert all(row[4] == "attention, mlp" for row in found)
    assert all("dims 1, 2 at the chosen tokens" in row[5] for row in found)
    assert all(int(row[6].partition(":")[0]) > 3 and "repeat" in row[6] for row in found)
    assert "4 blocks can be routed, 0 refused; 85,248 parameters, 75,840 of them in blocks that can be routed" in out


def test_inspect_gives_the_reason_of_each_refusal(capsys: Capture) -> None:
    out, _ = run(capsys, "inspect", "tests.test_cli:mixed")
    refused = [line for line in out.splitlines() if "RunningSum" in line]
    assert len(refused) == 2
    assert all("layers.1" in refused[0] and "cumsum" in line for line in refused)
    assert "2 blocks can be routed, 2 refused" in out
    assert "layers.0" in out


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
    monkeypatch.setattr("modpass.cli.export.BOUNDS", {"float32": (1e-12, 1.0)})
    _, err = run(capsys, "export", DECODER, tmp_path / "m.onnx", "--sequence", 16, code=1)
    assert err.startswith("modpass: output 'output' is off by ")
    assert err.count("\n") == 1


def test_bench_measures_and_writes_a_report(tmp_path: Path, capsys: Capture) -> None:
    options = ["--sequence", 64, "--capacity", 0.25, "--repeats", 2, "--warmup", 0, "--runner", "torch"]
    out, err = run(capsys, "bench", DECODER, *options, "--out", tmp_path / "report")
    assert err == ""
    assert re.search(r"^ *torch +-?\d+% +\d+\.\d+×", out, re.M)
    assert sorted(p.suffix for p in (tmp_path / "report").iterdir()) == [".json", ".md", ".png"]
    case = json.loads((tmp_path / "report" / "tests.bench_decoder-decoder.json").read_text())["case"]
    assert (case["sequence"], case["capacity"], case["every"]) == (64, 0.25, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_bench_fails_where_nothing_could_run(capsys: Capture) -> None:
    options = ["--sequence", 32, "--runner", "torch-cuda"]
    out, err = run(capsys, "bench", DECODER, *options, code=1)
    assert "no NVIDIA GPU" in out
    assert err == "modpass: no runner could run here, see the table\n"


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


# Failures


WRONG_ARGUMENTS: dict[str, tuple[list[str], str]] = {
    "no command": ([], "Missing command. (see: modpass --help)"),
    "no such command": (["fly"], "No such command 'fly'."),
    "no such option": (["export", "--fly"], "No such option: --fly"),
    "no model": (["inspect"], "Missing argument 'MODEL'. (see: modpass inspect --help)"),
    "too many": (["inspect", "a", "b"], "unexpected extra argument"),
    "capacity of 0": (
        ["export", DECODER, "m.onnx", "--capacity", "0"],
        "'--capacity': capacity of the block is 0.0; it",
    ),
    "capacity of nan": (["export", DECODER, "m.onnx", "--capacity", "nan"], "it must be a number in (0, 1]"),
    "capacity in words": (["export", DECODER, "m.onnx", "--capacity", "half"], "'--capacity': "),
    "every 0": (["transform", DECODER, "m", "--every", "0"], "'--every': "),
    "no such gate": (
        ["transform", DECODER, "m", "--gate", "golden"],
        "'golden' is not one of 'linear', 'sigmoid', 'unit'",
    ),
    "no such dtype": (["export", DECODER, "m.onnx", "--dtype", "int4"], "'int4' is not one of 'float32'"),
    "opset 17": (["export", DECODER, "m.onnx", "--opset", "17"], "'--opset': "),
    "dim without a size": (
        ["export", DECODER, "m.onnx", "--dim", "width"],
        "'width' is not of the form NAME=N",
    ),
    "dim of 0": (["export", DECODER, "m.onnx", "--dim", "width=0"], "'width=0' is not of the form NAME=N"),
    "no sequence": (
        ["export", DECODER, "m.onnx"],
        "inputs are input_ids[batch, sequence]; give --sequence N",
    ),
    "dense and routed": (["export", DECODER, "m.onnx", "--dense", "--every", "2"], "leave out --every"),
    "factory of a dense model": (
        ["inspect", DECODER, "--factory", DECODER],
        "is no saved model that needs one; leave",
    ),
    "folder as file": (["export", DECODER, ".", "--sequence", "8"], "'.' is a directory."),
    "file as folder": (["transform", DECODER, "setup.cfg"], "'setup.cfg' is a file."),
    "no such onnx": (["build", "absent.onnx", "m.engine"], "'absent.onnx' does not exist."),
    "no such flavour": (
        ["build", "setup.cfg", "m.engine", "--flavor", "cheese"],
        "'cheese' is not one of 'tensorrt-rtx'",
    ),
    "level 6": (
        ["build", "setup.cfg", "m.engine", "--optimization-level", "6"],
        "'--optimization-level': ",
    ),
    "no such runner": (
        ["bench", DECODER, "--runner", "tortoise"],
        "no runner is called 'tortoise'; there are: torch,",
    ),
    "no repeats": (["bench", DECODER, "--repeats", "0"], "'--repeats': "),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_wrong_arguments_are_one_line_and_code_2(case: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments, message = WRONG_ARGUMENTS[case]
    assert message in fails(capsys, 2, *arguments)


FAILURES: dict[str, tuple[list[str], str]] = {
    "no such model": (["inspect", "absent"], "MODEL 'absent' is not there; it may be a bundled model ("),
    "no such module": (
        ["inspect", "absent.module:make"],
        "names the module 'absent.module', which cannot be found",
    ),
    "no example inputs": (
        ["inspect", "tests.bench_decoder:Decoder"],
        "Decoder does not say what it takes; pass example_in",
    ),
    "no such block": (
        ["transform", DECODER, "m", "--blocks", "layers.9"],
        "there is no block 'layers.9'; there are: layers",
    ),
    "no such mask": (
        ["transform", DECODER, "m", "--padding-mask", "pads"],
        "padding_mask 'pads' is no traced input",
    ),
    "every 9": (["transform", DECODER, "m", "--every", "9"], "no block is left to route (every=9)"),
    "no onnx": (["build", "setup.cfg", "m.engine"], "'setup.cfg' cannot be read as an ONNX model"),
    "no such dim": (
        ["export", DECODER, "m.onnx", "--sequence", "8", "--dim", "width=8"],
        "the model has no dim 'width'",
    ),
    "bench without sequence": (["bench", DECODER], "give a sequence"),
    "wrong dtype": (
        ["bench", DECODER, "--sequence", "8", "--dtype", "float16"],
        "are float32, the case says float16",
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failures_are_one_sentence_and_code_1(case: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments, message = FAILURES[case]
    assert message in fails(capsys, 1, *arguments)
    assert not (ROOT / "m").exists()
    assert not (ROOT / "m.onnx").exists()


def test_noise_cannot_be_exported(tmp_path: Path, capsys: Capture) -> None:
    options = ["--sequence", 8, "--selection", "stochastic"]
    assert "selects by noise" in fails(capsys, 1, "export", DECODER, tmp_path / "m.onnx", *options)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_files_is_kept(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "thesis.tex").write_text("dear")
    assert "holds 'thesis.tex', which saving would remove" in fails(capsys, 1, "transform", DECODER, tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "dear"


def test_a_saved_model_keeps_its_settings(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    for options in (["--capacity", 0.5], ["--dense"]):
        out = ["export", saved, tmp_path / "m.onnx", "--factory", DECODER, "--sequence", 8, *options]
        assert "'saved' is routed already and keeps its own settings; leave it out" in fails(capsys, 2, *out)


def test_a_saved_model_of_no_known_class_needs_its_factory(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    found = fails(capsys, 2, "export", saved, tmp_path / "m.onnx", "--sequence", 8)
    assert "was made from Decoder, which only a function of yours can build; name it" in found
    assert "holds no weight" in fails(capsys, 1, "inspect", saved, "--factory", "tests.test_cli:biased")


def test_a_routed_model_is_not_transformed_again(tmp_path: Path, capsys: Capture) -> None:
    modpass.save_pretrained(modpass.mod_transform(make("llama")), tmp_path / "saved")
    assert "is routed already; give a dense model" in fails(
        capsys, 2, "transform", tmp_path / "saved", tmp_path / "again"
    )


def test_an_unexpected_error_is_one_line_until_debug(capsys: Capture) -> None:
    found = fails(capsys, 1, "inspect", "tests.test_cli:broken")
    error, hint = "ZeroDivisionError: no such number", "(run again with --debug for the traceback)"
    assert found == f"modpass: unexpected error: {error} {hint}\n"


@pytest.mark.parametrize("place", [0, 2])
def test_debug_shows_the_traceback_wherever_it_stands(place: int, capsys: Capture) -> None:
    for name, last in (
        ("broken", "unexpected error: ZeroDivisionError: no such number"),
        ("refused", "the sentence"),
    ):
        arguments = ["inspect", f"tests.test_cli:{name}"]
        arguments.insert(place, "--debug")
        _, err = run(capsys, *arguments, code=1)
        assert err.startswith("Traceback (most recent call last):")
        assert err.splitlines()[-1] == f"modpass: {last}"


def test_an_interrupt_is_one_line_and_code_130(capsys: Capture) -> None:
    assert fails(capsys, 130, "inspect", "tests.test_cli:interrupted") == "modpass: interrupted\n"


def test_ctrl_c_stops_the_program(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "modpass", "inspect", "tests.test_cli:sleepy"]
    listens = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731  # test runners may ignore it
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listens
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=120)
    assert (program.returncode, err) == (130, "modpass: interrupted\n")


def test_the_module_and_the_script_are_one_program() -> None:
    module = [sys.executable, "-W", "ignore", "-m", "modpass", "--version"]
    script = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        "import sys; from modpass.cli import main; sys.exit(main())",
        "--version",
    ]
    for command in (module, script):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == (f"modpass {modpass.__version__}\n", "")


@pytest.mark.parametrize("command", ["inspect", "transform", "export", "build", "bench"])
def test_help_says_what_a_newcomer_needs(command: str, capsys: Capture) -> None:
    out, _ = run(capsys, "--help")
    assert f"  {command} " in out
    assert not any(line.endswith("...") for line in out.splitlines()[1:])
    out, _ = run(capsys, command, "--help")
    assert out.startswith(f"Usage: modpass {command} ")
    group: Any = typer.main.get_command(app)
    assert all(len(parameter.help) > 15 for parameter in group.commands[command].params)
