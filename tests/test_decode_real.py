"""Decode with real weights, engines of decoders, and what a killed export leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import modpass
from modpass.bench.models import load_bundled, load_tokenizer
from modpass.decode import decode_step
from modpass.decode.example import tiny_decoder
from modpass.exporters import DecoderSession, build_engine, export_decoder
from tests.decoders import LENGTH, causal

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2() -> Any:
    pytest.importorskip("gguf", reason="pip install 'modpass[models]'")
    return load_bundled("smollm2-135m")


def test_smollm2_generates_64_tokens_as_transformers_does(smollm2: Any, tmp_path: Path) -> None:
    tokenizer = load_tokenizer("smollm2-135m")
    export_decoder(modpass.trace(smollm2), tmp_path / "d", prompt=16, max_sequence=96, tokenizer=tokenizer)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        wanted = smollm2.generate(ids, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
    found = DecoderSession(tmp_path / "d").generate([ids[0].tolist()], 64)
    assert found.tokens == [wanted[0, ids.shape[1] :].tolist()]
    assert (tmp_path / "d" / "tokenizer").is_dir()


def test_smollm2_selects_causally_bit_for_bit_and_expert_choice_does_not(smollm2: Any) -> None:
    routed = modpass.mod_transform(smollm2, 0.25, selection="causal", gate="unit")
    ids = torch.randint(2, 1000, (2, 40))
    changed = torch.cat([ids[:, :25], torch.randint(2, 1000, (2, 15))], 1)
    for selection, equal in (("causal", True), ("expert_choice", False)):
        for block in routed.routed_blocks.values():
            block.selection = selection
        with torch.no_grad():
            a, b = (routed(input_ids=x).logits[:, :25] for x in (ids, changed))
        assert torch.equal(a, b) is equal


def test_smollm2_routed_steps_equal_the_causal_forward_and_save_cache(smollm2: Any) -> None:
    length, capacity = 24, 0.125
    routed = modpass.mod_transform(smollm2, capacity, selection="causal", gate="unit")
    step = decode_step(routed, batch=2, max_sequence=length, padding=False)
    ids, state, found = torch.randint(2, 1000, (2, length)), step.state(), []
    with torch.no_grad():
        wanted = routed(input_ids=ids).logits
        for t in range(length):
            outputs = step.advance({"input_ids": ids[:, t : t + 1]}, torch.full((2,), t), state)
            found.append(outputs["logits"])
    assert float((torch.cat(found, 1) - wanted).abs().max() / wanted.abs().max()) < 1e-4
    dense = decode_step(modpass.trace(smollm2), batch=2, max_sequence=length, padding=False)
    share = sum(c.bytes for c in step.caches) / sum(c.bytes for c in dense.caches)
    assert share <= (1 + capacity) / 2 + 0.02


@pytest.mark.parametrize(("skipping", "branches"), [("masked", False), ("conditional", True)])
def test_both_graphs_build_and_the_masked_plan_has_no_branch(skipping: str, branches: bool, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="pip install 'modpass[tensorrt-rtx]'")
    folder = tmp_path / "d"
    export_decoder(causal("llama", 0.5), folder, prompt=16, max_sequence=LENGTH, skipping=skipping, dtype="float16")  # type: ignore[arg-type]
    for name in ("prefill", "decode"):
        build_engine(folder / f"{name}.onnx", folder / f"{name}.engine", compute_capability="8.9", progress=False)
    assert (b"cjmp" in (folder / "decode.engine").read_bytes()) is branches
    assert b"cjmp" not in (folder / "prefill.engine").read_bytes()


_EXPORT = """
import sys, torch
from modpass.decode.example import tiny_decoder
from modpass.exporters import decoder
whole = decoder.save_shared
def slow(*a):
    whole(*a); print("written", flush=True); import time; time.sleep(60)
decoder.save_shared = slow
decoder.export_decoder(tiny_decoder(), sys.argv[1], prompt=4, max_sequence=8)
"""


def test_a_killed_export_leaves_the_older_folder_working(tmp_path: Path) -> None:
    target = tmp_path / "d"
    export_decoder(tiny_decoder(), target, prompt=4, max_sequence=8)
    before = DecoderSession(target).generate([[1]], 3).tokens
    with subprocess.Popen([sys.executable, "-c", _EXPORT, str(target)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    assert DecoderSession(target).generate([[1]], 3).tokens == before
    assert [n for n in os.listdir(tmp_path) if not n.startswith(".")] == ["d"]


_GENERATE = """
import sys
from modpass.exporters import DecoderSession
session = DecoderSession(sys.argv[1])
print("ready", flush=True)
while True: session.generate([[1]], 7)
"""


def test_a_killed_generation_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "d"
    export_decoder(tiny_decoder(), target, prompt=4, max_sequence=8)
    with subprocess.Popen([sys.executable, "-c", _GENERATE, str(target)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
    DecoderSession(target).manifest.check(target)
    assert len(DecoderSession(target).generate([[1]], 3).tokens[0]) == 3
