"""Nothing that was changed, cut, swapped or made by another version is loaded: one sentence, exit code 1."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modpass.cli import main
from modpass.exporters import Manifest
from tests.broken_exports import (
    Break,
    cut,
    drop,
    fact,
    facts,
    flip,
    graph,
    outward,
    place,
    put,
    replaced,
    sound,
    swap,
    weights,
)
from tests.commands import Capture, run

FOLDER = ("verify", "{folder}")
ONNX, ENGINE = ("verify", "{folder}/m.onnx"), ("verify", "{folder}/m.engine")
DECODER = ("verify", "{folder}/decoder")
BUILD = ("build", "{folder}/m.onnx", "{folder}/older.engine")
GENERATE = ("generate", "{folder}/decoder", "text")

pytest.importorskip("tensorrt_rtx", reason="pip install 'modpass[tensorrt-rtx]'")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    (tmp_path / "export").mkdir()
    shutil.copytree(exported, tmp_path / "export", dirs_exist_ok=True)
    return tmp_path / "export"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(capsys: Capture, folder: Path, command: tuple[str, ...]) -> str:
    """The one sentence of a command that leaves every file as it is."""
    if command == BUILD:
        (folder / "older.engine").write_bytes(b"an older engine")
    before = contents(folder)
    capsys.readouterr()
    code = main([part.format(folder=folder) for part in command])
    _, err = capsys.readouterr()
    assert code == 1, err
    assert err.startswith("modpass: ")
    assert err.count("\n") == 1, err
    assert "unexpected error" not in err
    assert contents(folder) == before
    return err


def no_nodes(model: Any) -> None:
    del model.graph.node[:]


def renamed(model: Any) -> None:
    model.graph.output[0].name = "other"


def widened(model: Any) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 9


BROKEN: dict[str, tuple[Break, str, tuple[tuple[str, ...], ...]]] = {
    # the manifest of an ONNX file
    "manifest cut": (cut("m.onnx.json"), "m.onnx.json' cannot be read", (ONNX, BUILD)),
    "manifest empty": (put("m.onnx.json", b""), "m.onnx.json' cannot be read", (ONNX, BUILD)),
    "manifest changed": (replaced("m.onnx.json", '"k": 4', '"k": 5'), "its digest does not fit", (ONNX, BUILD)),
    "space in manifest": (replaced("m.onnx.json", "\n  ", "\n   "), "its digest does not fit", (ONNX, BUILD)),
    "manifest no JSON": (flip("m.onnx.json", 0.0), "m.onnx.json' cannot be read", (ONNX, BUILD)),
    "no digest": (put("m.onnx.json", b'{"schema": 2}'), "does not end with its own digest", (ONNX, BUILD)),
    "nested too deep": (put("m.onnx.json", b"[" * 100_000), "cannot be read: maximum recursion", (ONNX, BUILD)),
    "older schema": (facts("m.onnx.json", schema=1), "has schema 1, of an older modpass", (ONNX, BUILD)),
    "newer schema": (facts("m.onnx.json", schema=3), "has schema 3, of a newer modpass", (ONNX, BUILD)),
    "no manifest": (drop("m.onnx.json"), "there is no manifest '", (ONNX,)),
    "manifests swapped": (swap("m.onnx.json", "other/m.onnx.json"), "m.onnx' is not the file its", (ONNX, BUILD)),
    "engine's manifest": (put("m.onnx.json", "m.engine.json"), "m.onnx' has ", (ONNX,)),
    # the graph
    "graph cut": (cut("m.onnx"), "m.onnx' is not the file its manifest was written for", (ONNX, BUILD)),
    "graph empty": (put("m.onnx", b""), "m.onnx' is not the file its manifest was written for", (ONNX, BUILD)),
    "graph changed": (flip("m.onnx"), "m.onnx' is not the file its manifest was written for", (ONNX, BUILD)),
    "other graph": (put("m.onnx", "other/m.onnx"), "m.onnx' is not the file its manifest", (ONNX, BUILD)),
    "graph gone": (drop("m.onnx"), "m.onnx', which its manifest names, cannot be read", (FOLDER,)),
    "no graph in it": (graph(no_nodes), "m.onnx' holds no ONNX graph", (ONNX,)),
    "other output": (graph(renamed), "its outputs is ['other'], the manifest has ['output']", (ONNX,)),
    "other shape": (graph(widened), "'ids' is int64 [1, 9], the manifest has int64 [1, 8]", (ONNX,)),
    # what the manifest says of the graph, under a digest that fits
    "other opset": (facts("m.onnx.json", opset=19), "the opset is 18, the manifest has 19", (ONNX,)),
    "other k": (
        fact("m.onnx.json", "routed_blocks", "blocks.1", "k", value=3),
        "the choices of block 'blocks.1' is int64 [1, 4], the manifest has int64 [.., 3]",
        (ONNX,),
    ),
    "k above the sequence": (
        fact("m.onnx.json", "routed_blocks", "blocks.1", "k", value=9),
        "k = 9 of 8 tokens in block 'blocks.1'; allowed are 1 to 8",
        (ONNX,),
    ),
    "no such choices": (
        fact("m.onnx.json", "routed_blocks", "blocks.1", "indices", value="nothing"),
        "makes no value 'nothing', the choices of block 'blocks.1'",
        (ONNX,),
    ),
    "router not named": (facts("m.onnx.json", routed_blocks={}), "has a router in block 'blocks.1'", (ONNX,)),
    # the weights beside it
    "weights cut": (cut("m.onnx.data"), "m.onnx.data' is not the file", (ONNX, BUILD)),
    "weights changed": (flip("m.onnx.data"), "m.onnx.data' is not the file", (ONNX, BUILD)),
    "weights gone": (drop("m.onnx.data"), "m.onnx.data', which its manifest names, cannot be read", (ONNX, BUILD)),
    "weights are a link": (outward("m.onnx.data"), "a symlink out of the folder", (ONNX, BUILD)),
    "weights above": (place("location", "../m.onnx.data"), "which leads out of the folder", (ONNX, BUILD)),
    "weights anywhere": (place("location", "/etc/passwd"), "which leads out of the folder", (ONNX, BUILD)),
    "weights on a drive": (place("location", "C:\\weights"), "which leads out of the folder", (ONNX, BUILD)),
    "weights in a stray file": (place("location", "m.engine"), "which its manifest does not vouch for", (ONNX,)),
    "weights behind the end": (place("offset", "99999999"), "m.onnx.data', which has ", (ONNX, BUILD)),
    "weights before the start": (place("offset", "-4"), "bytes from byte -4 on", (ONNX, BUILD)),
    "weights too short": (place("length", "4"), "is said to take 4 bytes", (ONNX, BUILD)),
    "weights at no number": (place("offset", "x"), "has no sound place", (ONNX, BUILD)),
    "other weights": (weights, "output 'output' is off by", (ONNX,)),
    # what the model computed
    "probe changed": (flip("m.onnx.probe.safetensors"), "probe.safetensors' is not the file", (ONNX, BUILD)),
    "probe gone": (drop("m.onnx.probe.safetensors"), "which its manifest names, cannot be read", (ONNX, BUILD)),
    # the engine
    "engine cut": (cut("m.engine"), "m.engine' has 100 bytes, its manifest says ", (ENGINE,)),
    "engine changed": (flip("m.engine"), "m.engine' is not the file its manifest was written for", (ENGINE,)),
    "engine gone": (drop("m.engine"), "m.engine' cannot be read", (FOLDER,)),
    "engine's manifest gone": (drop("m.engine.json"), "there is no manifest '", (ENGINE,)),
    "engine's manifest changed": (flip("m.engine.json", 0.9), "m.engine.json'", (ENGINE,)),
    "graph as engine": (put("m.engine", "m.onnx"), "m.engine' has ", (ENGINE,)),
    "other version": (
        facts("m.engine.json", versions={"tensorrt_rtx": "1.0.0"}),
        "was built by TensorRT-RTX 1.0.0, this is ",
        (ENGINE,),
    ),
    "no version": (facts("m.engine.json", versions={}), "built by TensorRT-RTX of an unknown version", (ENGINE,)),
    "no such flavour": (facts("m.engine.json", flavor="cheese"), "flavor is 'cheese', allowed are", (ENGINE,)),
    "other GPU": (
        facts("m.engine.json", compute_capabilities=["8.6"]),
        "says that it is for compute capability 8.9, its manifest for 8.6",
        (ENGINE,),
    ),
    "of another graph": (facts("m.engine.json", onnx_sha256="00"), "built from another m.onnx than the", (ENGINE,)),
    "other inputs": (facts("m.engine.json", inputs=[]), "differ in their inputs", (ENGINE,)),
    # a decoder
    "decoder.json changed": (flip("decoder/decoder.json", 0.3), "decoder.json'", (DECODER, GENERATE)),
    "decoder.json older": (facts("decoder/decoder.json", schema=2), "of an older modpass", (DECODER, GENERATE)),
    "decoder.json newer": (facts("decoder/decoder.json", schema=4), "of a newer modpass", (DECODER, GENERATE)),
    "decoder.json gone": (drop("decoder/decoder.json"), "is no decoder folder", (GENERATE,)),
    "graphs swapped": (
        swap("decoder/prefill.onnx", "decoder/decode.onnx"),
        "onnx' is not the file that was exported",
        (DECODER,),
    ),
    "decoder's weights": (
        put("decoder/weights.bin", b"x"),
        "weights.bin' is not the file that was exported",
        (DECODER,),
    ),
    "decoder's probe": (flip("decoder/probe.safetensors"), "probe.safetensors' is not the file", (DECODER,)),
    "fewer files": (facts("decoder/decoder.json", files={}), "does not vouch for 'prefill.onnx'", (DECODER, GENERATE)),
    "other cache": (facts("decoder/decoder.json", batch=2), "of the decode graph is", (DECODER,)),
    "tokenizer changed": (
        flip("decoder/tokenizer/tokenizer.json"),
        "tokenizer.json' is not the file that was exported",
        (DECODER, GENERATE),
    ),
    "tokenizer gone": (drop("decoder/tokenizer/tokenizer.json"), "tokenizer.json' is missing", (DECODER, GENERATE)),
    "file in tokenizer": (
        put("decoder/tokenizer/chat_template.jinja", b"{{ x }}"),
        "does not vouch for",
        (DECODER, GENERATE),
    ),
}
RUN = {"other weights"}  # what nothing but running it can tell


def test_the_list_is_long_enough() -> None:
    assert len(BROKEN) >= 20


def test_a_sound_export_is_sound(folder: Path, capsys: Capture) -> None:
    before = contents(folder)
    out, err = run(capsys, "verify", folder)
    assert err == ""
    assert out.splitlines()[-1] == "sound: 26 checks of 6 files passed, 1 could not be made"
    assert contents(folder) == before


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_not_sound_is_one_sentence_and_nothing_is_loaded(
    case: str, folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks, message, commands = BROKEN[case]
    breaks(folder)
    loaded: list[Any] = []
    if case not in RUN and FOLDER not in commands:
        monkeypatch.setattr(onnxruntime, "InferenceSession", lambda path, *_, **__: loaded.append(path))
    for command in commands:
        assert message in refused(capsys, folder, command)
    assert loaded == []


def test_a_model_is_compared_and_another_one_is_told(exported: Path, capsys: Capture) -> None:
    out, _ = run(capsys, "verify", exported / "m.onnx", "--model", "tests.broken_exports:encoder")
    assert "of the model, token choices 100.00% equal" in out
    other = ("verify", str(exported / "m.onnx"), "--model", "tests.bench_decoder:decoder")
    assert "routes block 'blocks.1', the model does not" in refused(capsys, exported, other)
    assert "a model is compared with one ONNX file" in refused(capsys, exported, ("verify", str(exported), *other[2:]))


def test_a_folder_with_nothing_in_it_and_a_link_out_of_it_are_told(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "notes.txt").write_text("dear")
    assert "holds nothing that modpass exported" in refused(capsys, tmp_path, ("verify", str(tmp_path)))
    assert "there is no manifest" in refused(capsys, tmp_path, ("verify", str(tmp_path / "notes.txt")))
    (tmp_path / "out").symlink_to("/")
    assert "a symlink out of the folder" in refused(capsys, tmp_path, ("verify", str(tmp_path)))


# Any byte


FILES = ("m.onnx.json", "m.onnx", "m.onnx.data", "m.engine.json", "m.engine", "decoder/decoder.json")
SEEN: set[tuple[str, bool, int, int]] = set()


@settings(
    max_examples=520, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(name=st.sampled_from(FILES), cuts=st.booleans(), at=st.integers(0, 2**40), bits=st.integers(1, 255))
def test_any_changed_or_missing_byte_is_noticed(
    exported: Path, capsys: Capture, name: str, cuts: bool, at: int, bits: int
) -> None:
    path = exported / name
    whole = path.read_bytes()
    place = (at * 2_654_435_761 + bits) % len(whole)  # spread, as small numbers are drawn more often
    broken = bytearray(whole)
    broken[place] ^= bits
    SEEN.add((name, cuts, place, 0 if cuts else bits))
    target = exported / "decoder" if name.startswith("decoder") else path
    try:
        path.write_bytes(whole[:place] if cuts else broken)
        capsys.readouterr()
        code = main(["verify", str(target)])
        _, err = capsys.readouterr()
    finally:
        path.write_bytes(whole)
    assert (code, err.count("\n"), "unexpected error" in err) == (1, 1, False), err


def test_so_many_bytes_were_tried() -> None:
    if SEEN:  # unless it runs alone, or elsewhere
        assert len(SEEN) >= 500


def test_the_manifests_of_a_sound_export_are_of_this_schema(exported: Path) -> None:
    assert Manifest.load(exported / "m.onnx.json").probe is not None
    assert Manifest.load(exported / "m.engine.json").probe is None
