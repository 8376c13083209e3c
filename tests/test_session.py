"""Exported decoders against plain generation by the full forward."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import modpass
from modpass.decode.example import tiny_decoder
from modpass.errors import BlockError, InputError, StateError, VerificationError
from modpass.exporters import DecoderSession, export_decoder
from modpass.exporters.sampling import Sampler
from tests.decoders import LENGTH, causal, dense, full_forward, tiny_folder
from tests.sealing import change

PROMPTS = [[5, 9, 11, 40, 33, 2], [7, 8, 9], [3, 4, 5, 6, 7, 8, 9, 10, 11], [60]]


def greedy(model: modpass.RoutedModel, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(full_forward(model, torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny routed decoder for two rows."""
    return tiny_folder(tmp_path_factory.mktemp("decoder") / "tiny")


@pytest.mark.parametrize(
    ("name", "capacity", "batch", "skipping"),
    [
        ("llama", None, 4, None),
        ("inner-rotary", 0.25, 4, "masked"),
        ("tril-buffer", 0.5, 1, "conditional"),
        pytest.param("llama", 0.25, 1, "conditional", marks=pytest.mark.slow),
        pytest.param("gpt2", 0.5, 4, "masked", marks=pytest.mark.slow),
        pytest.param("alibi", 0.5, 4, "masked", marks=pytest.mark.slow),
        pytest.param("mixtral", 0.5, 1, "conditional", marks=pytest.mark.slow),
    ],
)
def test_a_session_generates_what_the_full_forward_does(
    name: str, capacity: float | None, batch: int, skipping: str | None, tmp_path: Path
) -> None:
    """Prompts shorter and longer than the prefill, rows of different length."""
    model = dense(name)[1] if capacity is None else causal(name, capacity)
    export_decoder(model, tmp_path / "d", batch=batch, prompt=6, max_sequence=LENGTH, skipping=skipping)  # type: ignore[arg-type]
    found = DecoderSession(tmp_path / "d").generate(PROMPTS[:batch], 12)
    assert found.tokens == [greedy(model, p, 12) for p in PROMPTS[:batch]]
    assert found.statistics.tokens == 12 * batch
    assert (found.statistics.decisions > 0) is (capacity is not None)


def test_conditional_files_hold_a_branch_for_each_routed_block_and_masked_ones_none(tmp_path: Path) -> None:
    for skipping, count in (("conditional", 1), ("masked", 0)):
        export_decoder(tiny_decoder(True), tmp_path / skipping, prompt=4, max_sequence=8, skipping=skipping)  # type: ignore[arg-type]
        graph = onnx.load(tmp_path / skipping / "decode.onnx", load_external_data=False).graph
        assert sum(n.op_type == "If" for n in graph.node) == count


def test_the_two_graphs_share_one_file_of_weights(tmp_path: Path) -> None:
    model = dense("llama")[1]
    export_decoder(model, tmp_path / "d", prompt=4, max_sequence=8)
    own = sum(p.numel() * 4 for p in model.parameters())
    assert (tmp_path / "d" / "weights.bin").stat().st_size < 1.1 * own
    for name in ("prefill.onnx", "decode.onnx"):
        assert (tmp_path / "d" / name).stat().st_size < own


def test_tokens_come_as_a_stream_and_stop_ids_end_a_row(folder: Path) -> None:
    session, seen = DecoderSession(folder), list[tuple[int, int]]()
    whole = session.generate([[1, 2], [3]], 6).tokens
    stop = whole[0][2]
    found = session.generate([[1, 2], [3]], 6, stop=[stop], stream=lambda row, token: seen.append((row, token)))
    assert found.tokens[0] == whole[0][: whole[0].index(stop) + 1]
    assert [t for row, t in seen if row == 1] == found.tokens[1]


def test_a_session_can_be_used_again_and_draws_repeat_by_seed(folder: Path) -> None:
    session = DecoderSession(folder)
    assert session.generate([[1, 2]], 6).tokens == session.generate([[1, 2]], 6).tokens
    drawn = [session.generate([[1, 2]], 6, temperature=2.0, seed=s).tokens for s in (1, 1, 2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_a_finished_row_no_longer_takes_slots(folder: Path) -> None:
    session = DecoderSession(folder)
    first = session.generate([[1, 2]], 1).tokens[0][0]
    session.generate([[1, 2], [3]], 6, stop=[first])
    count = session.backend.arrays["blocks.1.count"][0]
    assert count <= 2


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([], {}, "0 prompts were given; this decoder takes 1 to 2"),
        ([[1], [2], [3]], {}, "3 prompts were given"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1] * 10], {"max_new_tokens": 3}, "prompt 0 has 10 tokens and 3 more are asked for; the caches hold 12"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1]], {"temperature": -1.0}, "temperature is -1.0"),
        ([[1]], {"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0"),
        ([[1]], {"temperature": 1.0, "top_k": 0}, "top_k is 0"),
    ],
)
def test_what_a_session_cannot_do_is_refused_in_words(
    folder: Path, prompts: list[list[int]], options: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        DecoderSession(folder).generate(prompts, **{"max_new_tokens": 2, **options})  # type: ignore[arg-type]


def test_a_changed_or_missing_file_is_refused_before_it_is_loaded(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"there is no manifest '.*decoder.json'"):
        DecoderSession(tmp_path)
    for name in ("prefill.onnx", "decode.onnx"):
        copy = tmp_path / name
        copy.mkdir()
        for file in folder.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        content = bytearray((copy / name).read_bytes())
        content[-1] ^= 1
        (copy / name).write_bytes(content)
        with pytest.raises(VerificationError, match=f"'.*{name}' is not the file that was exported"):
            DecoderSession(copy)


def test_a_file_name_that_leaves_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    files = json.loads((tmp_path / "decoder.json").read_text())["files"]
    change(tmp_path / "decoder.json", files={**files, "../outside": "00"})
    with pytest.raises(VerificationError, match=r"names the file '\.\./outside', which leads out of the folder"):
        DecoderSession(tmp_path)


def test_a_refused_or_broken_export_leaves_the_older_folder_working(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "d"
    torch.manual_seed(0)
    export_decoder(tiny_decoder(), target, prompt=4, max_sequence=8)
    before = DecoderSession(target).generate([[1]], 3).tokens
    with pytest.raises(BlockError):
        export_decoder(modpass.trace(torch.nn.Linear(3, 3), (torch.zeros(2, 3),)), target)

    def broken(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("modpass.exporters.decoder.describe", broken)
    with pytest.raises(KeyboardInterrupt):
        export_decoder(tiny_decoder(), target, prompt=4, max_sequence=8)
    assert DecoderSession(target).generate([[1]], 3).tokens == before
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_drawing_keeps_to_the_likeliest() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]]))
    draws = lambda **options: {int(Sampler(1.0, seed=s, **options)(logits)[0]) for s in range(200)}  # noqa: E731
    assert draws() == {0, 1, 2, 3}
    assert draws(top_k=2) == {0, 1}
    assert draws(top_p=0.79) == {0, 1}
    assert draws(top_p=0.4) == {0}
    assert int(Sampler()(logits)[0]) == 0


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_that_are_not_used_take_no_place_from_the_living(rows: int, tmp_path: Path) -> None:
    """Two of four rows go through a block at once: up to two prompts lose nothing to the rows that fill the batch."""
    model = causal("inner-rotary", 0.5)
    export_decoder(model, tmp_path / "d", batch=4, prompt=6, max_sequence=LENGTH, skipping="batch_capacity")
    found = DecoderSession(tmp_path / "d").generate(PROMPTS[:rows], 12)
    assert found.tokens == [greedy(model, p, 12) for p in PROMPTS[:rows]]
    assert 0 < found.statistics.skipped < found.statistics.decisions
