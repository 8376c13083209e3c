"""The command line: every failure by its text and exit code, interrupts, and help."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import modpass
from modpass.cli import app
from tests.commands import DECODER, ROOT, Capture, fails, run
from tests.zoo import make


@pytest.fixture
def saved(tmp_path: Path, capsys: Capture) -> Path:
    run(capsys, "transform", DECODER, tmp_path / "saved", "--capacity", 0.25)
    return tmp_path / "saved"


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
    "nothing to verify": (["verify", "absent.onnx"], "'absent.onnx' does not exist."),
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
    assert "holds no weight" in fails(capsys, 1, "inspect", saved, "--factory", "tests.commands:biased")


def test_a_routed_model_is_not_transformed_again(tmp_path: Path, capsys: Capture) -> None:
    modpass.save_pretrained(modpass.mod_transform(make("llama")), tmp_path / "saved")
    assert "is routed already; give a dense model" in fails(
        capsys, 2, "transform", tmp_path / "saved", tmp_path / "again"
    )


def test_an_unexpected_error_is_one_line_until_debug(capsys: Capture) -> None:
    found = fails(capsys, 1, "inspect", "tests.commands:broken")
    error, hint = "ZeroDivisionError: no such number", "(run again with --debug for the traceback)"
    assert found == f"modpass: unexpected error: {error} {hint}\n"


def test_a_file_that_the_system_refuses_is_named_with_what_to_check(capsys: Capture) -> None:
    found = fails(capsys, 1, "export-decoder", DECODER, "m" * 300)
    assert found.startswith("modpass: 'mmm")
    assert found.endswith("m' cannot be written or read: File name too long; check its name, rights and free space\n")


@pytest.mark.parametrize("place", [0, 2])
def test_debug_shows_the_traceback_wherever_it_stands(place: int, capsys: Capture) -> None:
    for name, last in (
        ("broken", "unexpected error: ZeroDivisionError: no such number"),
        ("refused", "the sentence"),
    ):
        arguments = ["inspect", f"tests.commands:{name}"]
        arguments.insert(place, "--debug")
        _, err = run(capsys, *arguments, code=1)
        assert err.startswith("Traceback (most recent call last):")
        assert err.splitlines()[-1] == f"modpass: {last}"


def test_an_interrupt_is_one_line_and_code_130(capsys: Capture) -> None:
    assert fails(capsys, 130, "inspect", "tests.commands:interrupted") == "modpass: interrupted\n"


def test_ctrl_c_stops_the_program(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "modpass", "inspect", "tests.commands:sleepy"]
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


@pytest.mark.parametrize("command", ["inspect", "transform", "export", "build", "verify", "plan-report", "bench"])
def test_help_says_what_a_newcomer_needs(command: str, capsys: Capture) -> None:
    out, _ = run(capsys, "--help")
    assert f"  {command} " in out
    assert not any(line.endswith("...") for line in out.splitlines()[1:])
    out, _ = run(capsys, command, "--help")
    assert out.startswith(f"Usage: modpass {command} ")
    group: Any = typer.main.get_command(app)
    assert all(len(parameter.help) > 15 for parameter in group.commands[command].params)
