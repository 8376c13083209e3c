"""``modpass generate``: text, its backends, and what it refuses."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from modpass.cli import generate, main
from modpass.decode.example import tiny_decoder
from modpass.exporters import DecoderSession, backends, export_decoder, trt_api
from modpass.exporters.onnx_device import OnnxRuntimeCudaBackend
from modpass.exporters.tensorrt_backend import TensorRTBackend
from tests.trt_fake import fake_build, fake_runtime

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A routed decoder over eleven words, with its tokenizer."""
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="one"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    target = tmp_path_factory.mktemp("decoder") / "tiny"
    torch.manual_seed(0)
    model = tiny_decoder(True)
    export_decoder(
        model, target, prompt=4, max_sequence=12, skipping="masked",
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=words),
    )  # fmt: skip
    fake_build(target)
    return target


def run(capsys: Capture, *arguments: object, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    found = main(["generate", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert found == code, err
    return out, err


def test_text_comes_and_what_it_cost(folder: Path, capsys: Capture) -> None:
    out, err = run(capsys, folder, "three four", "--max-new-tokens", 5)
    assert out.split() == [WORDS[t] for t in DecoderSession(folder).generate([[2, 3]], 5).tokens[0]]
    assert err.startswith("5 tokens, ")
    assert "of routed blocks skipped; caches 0.0 MiB" in err


@pytest.mark.parametrize("backend", ["onnxruntime", "onnxruntime-cuda", "tensorrt"])
def test_every_backend_writes_the_same_text(
    backend: str, folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, with a TensorRT whose engines ONNX Runtime runs."""
    monkeypatch.setattr(trt_api, "_LOGGERS", {})
    monkeypatch.setitem(sys.modules, "tensorrt", fake_runtime())
    monkeypatch.setitem(backends.BACKENDS, "onnxruntime-cuda", partial(OnnxRuntimeCudaBackend, "cpu"))
    monkeypatch.setitem(backends.BACKENDS, "tensorrt", partial(TensorRTBackend, "tensorrt", "cpu"))
    wanted, _ = run(capsys, folder, "three four", "--max-new-tokens", 6)
    out, err = run(capsys, folder, "three four", "--max-new-tokens", 6, "--backend", backend)
    assert out == wanted
    assert ("no CUDA graph of a step: a CPU has no CUDA graphs" in err) is (backend != "onnxruntime")


def test_what_cannot_be_generated_is_one_sentence(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(code: int, *arguments: object) -> str:
        out, err = run(capsys, *arguments, code=code)
        assert out == ""
        assert err.startswith("modpass: ")
        assert err.count("\n") == 1
        return err

    assert "is no decoder folder; 'modpass export-decoder' and" in fails(1, tmp_path, "three")
    assert "'sun' is not one of 'onnxruntime', 'onnxruntime-cuda'" in fails(2, folder, "three", "--backend", "sun")
    assert "top_p is 1.5; it must be None" in fails(1, folder, "three", "--top-p", 1.5)
    if not torch.cuda.is_available():
        pytest.importorskip("tensorrt_rtx", reason="pip install 'modpass[tensorrt-rtx]'")
        found = fails(1, folder, "three", "--backend", "tensorrt-rtx")
        assert "backend 'tensorrt-rtx' needs an NVIDIA GPU" in found
    monkeypatch.setattr(trt_api, "_LOGGERS", {})
    monkeypatch.setitem(sys.modules, "tensorrt", fake_runtime())
    monkeypatch.setitem(backends.BACKENDS, "tensorrt", partial(TensorRTBackend, "tensorrt", "cpu"))
    engine = (folder / "decode.engine").rename(tmp_path / "decode.engine")
    try:
        found = fails(1, folder, "three", "--backend", "tensorrt")
        assert f"decode.engine' is missing; build it with: modpass build {folder} --flavor tensorrt" in found
    finally:
        engine.rename(folder / "decode.engine")


def test_the_choices_of_the_option_are_the_backends() -> None:
    assert get_args(get_args(generate.BackendOption)[0]) == tuple(backends.BACKENDS)
