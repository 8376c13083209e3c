"""``modpass export`` for servers: buckets and Triton repositories, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from modpass.exporters import BucketSession
from tests.commands import DECODER, Capture, fails, run


def test_buckets_are_written_and_each_compared(tmp_path: Path, capsys: Capture) -> None:
    out, err = run(capsys, "export", DECODER, "--buckets", "2x16,1x8", "--out", tmp_path / "b", "--selection", "causal")
    assert err == ""
    assert out.count("in ONNX Runtime beside PyTorch, output: max abs") == 2
    assert "smaller requests: tokens are padded on the right, rows are added" in out
    assert f"wrote {tmp_path / 'b'} (1x8.onnx" in out
    session = BucketSession(tmp_path / "b")
    assert session({"input_ids": [[3] * 9]})["output"].shape[:2] == (1, 9)
    models = "wrote {} (Triton models: again_1x8, again_2x16)"
    (tmp_path / "b").rename(tmp_path / "again")
    out, _ = run(capsys, "export", tmp_path / "again", "--triton", tmp_path / "r", "--instances", 3)
    assert models.format(tmp_path / "r") in out
    assert "count: 3" in (tmp_path / "r" / "again_1x8" / "config.pbtxt").read_text()


def test_a_repository_is_written_in_one_step(tmp_path: Path, capsys: Capture) -> None:
    out, _ = run(capsys, "export", DECODER, "--triton", tmp_path / "r", "--sequence", 8, "--batch", 2, "--no-verify")
    assert out == f"wrote {tmp_path / 'r'} (Triton models: decoder_2x8)\n"
    assert {p.name for p in tmp_path.iterdir()} == {"r"}


B = ["--buckets", "1x8"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "'OUT.onnx': name the file to write"),
        (["m.onnx", *B, "--out", "b"], "'m.onnx' is for one ONNX file; folders go to --out and --triton"),
        (["m.onnx", "--triton", "r"], "'m.onnx' is for one ONNX file"),
        (B, "'--buckets': name the folder to write, by --out or --triton"),
        (["--out", "b"], "'--out': it is the folder for --buckets"),
        ([*B, "--out", "b", "--sequence", "8"], "'--sequence': the buckets say it already"),
        ([*B, "--out", "b", "--batch", "2"], "'--batch': the buckets say it already"),
        (["--buckets", "8x", "--out", "b"], "'8x' is no bucket; give BATCHxSEQUENCE"),
        (["--buckets", "1x0", "--out", "b"], "'1x0' is no bucket"),
        (["--buckets", "", "--out", "b"], "'' is no bucket"),
        (["--triton", "r"], "'--sequence': the model's inputs are input_ids[batch, sequence]"),
        ([*B, "--out", "b", "--instances", "0"], "'--instances': "),
    ],
)
def test_options_that_do_not_go_together(
    options: list[str], message: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in fails(capsys, 2, "export", DECODER, *options)
    assert list(tmp_path.iterdir()) == []


def test_folders_with_other_files_are_kept(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    for option in (["--out", tmp_path / "mine"], ["--triton", tmp_path / "mine"]):
        assert "holds other files" in fails(capsys, 1, "export", DECODER, *B, *option)
    assert (tmp_path / "mine" / "notes").read_text() == "x"
