"""The picture of a model's blocks, and the command that writes it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers

import modpass
from modpass.errors import MissingExtraError
from modpass.picture import picture
from modpass.sides import side_inputs
from tests.commands import DECODER, Capture, fails, run
from tests.zoo import make, tokens


def test_a_picture_shows_blocks_streams_side_inputs_and_hoisted_values() -> None:
    text = picture(modpass.find_blocks(make("alibi"), (tokens(2, 11),)))
    boxes = [line for line in text.splitlines() if "PreNorm" in line]
    assert len(boxes) == 4
    assert all("stream [B, S, 48]\\nparts: block, attention, mlp\\nhoisted: repeat" in box for box in boxes)
    assert text.count('[label="[B, S, 48]"]') == 3, "each block is joined to the next"
    assert text.count('[label="dims 1, 2 at the chosen tokens", style=dashed]') == 4
    assert text.count("shape=ellipse") == 4, "each block makes its own bias"


def test_a_side_input_that_blocks_share_is_drawn_once() -> None:
    text = picture(modpass.find_blocks(make("llama")))
    masks = [line for line in text.splitlines() if "dims 2, 3 at the chosen tokens" in line]
    assert len(masks) == 4
    assert len({line.split()[0] for line in masks}) == 1


def test_what_a_decoder_takes_from_its_encoder_is_shown_as_whole() -> None:
    config = transformers.T5Config(vocab_size=97, d_model=48, d_kv=12, d_ff=80, num_layers=2, num_heads=4)
    blocks = modpass.find_blocks(transformers.T5ForConditionalGeneration(config).eval())
    decoder = [b for b in blocks if b.name.startswith("decoder")]
    assert len(decoder) == 2
    assert all("whole" in side_inputs(b.analysis).values() for b in decoder)
    assert not any("whole" in side_inputs(b.analysis).values() for b in blocks if b.name.startswith("encoder"))


def test_the_command_writes_the_picture_with_refusals(tmp_path: Path, capsys: Capture) -> None:
    out, err = run(capsys, "inspect", "tests.commands:mixed", "--dot", tmp_path / "blocks.dot")
    assert err == ""
    assert f"wrote {tmp_path / 'blocks.dot'}; for an image: dot -Tsvg" in out
    text = (tmp_path / "blocks.dot").read_text()
    assert text.startswith("digraph")
    refused = [line for line in text.splitlines() if "refused: aten.cumsum.default runs along the sequence" in line]
    assert len(refused) == 2
    assert all("style=dashed, color=firebrick" in line for line in refused)
    order = [line.partition('label="')[2].partition("\\n")[0] for line in text.splitlines() if "shape=box" in line]
    assert order == [f"layers.{i}" for i in range(4)]


def test_quotes_and_backslashes_of_a_reason_are_escaped() -> None:
    skipped = modpass.Skipped("layers.0", "Conv", 'no "such" \\ thing')
    assert r"refused: no \"such\" \\ thing" in picture(modpass.Blocks((), (skipped,)))


def test_a_picture_without_pydot_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydot", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'modpass\[dot\]'"):
        picture(modpass.Blocks((), ()))


def test_a_routed_model_has_no_picture_and_no_check(tmp_path: Path, capsys: Capture) -> None:
    modpass.save_pretrained(modpass.mod_transform(make("llama")), tmp_path / "m")
    for option in (["--dot", tmp_path / "x.dot"], ["--check"]):
        message = fails(capsys, 2, "inspect", tmp_path / "m", *option)
        assert f"'{option[0]}': 'm' is routed already; give its dense model, or leave it out" in message
    assert not (tmp_path / "x.dot").exists()


def test_parts_and_check_are_options_of_transform_and_export(tmp_path: Path, capsys: Capture) -> None:
    run(capsys, "transform", DECODER, tmp_path / "m", "--parts", "mlp", "--check")
    out, _ = run(capsys, "inspect", tmp_path / "m", "--factory", DECODER)
    assert "mlp" in out
    out, _ = run(capsys, "export", DECODER, tmp_path / "m.onnx", "--sequence", 16, "--parts", "attention", "--no-check")
    assert "layers.1: 2 of 16 tokens (capacity 0.125)" in out
    wrong = fails(capsys, 2, "export", DECODER, tmp_path / "m.onnx", "--sequence", 16, "--parts", "heads")
    assert "'heads' is not one of 'block', 'attention', 'mlp'" in wrong


def test_a_part_that_no_block_has_is_refused_by_the_command(tmp_path: Path, capsys: Capture) -> None:
    _, message = run(capsys, "transform", "tests.test_picture:attention_only", tmp_path / "m", "--parts", "mlp", code=1)
    assert "parts='mlp': it has no MLP, a branch with a product and without attention" in message


def attention_only() -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    from tests.test_parts import AttentionAlone

    return torch.nn.Sequential(AttentionAlone(), AttentionAlone()), (torch.randn(2, 9, 48),)
