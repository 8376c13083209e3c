"""The manifest: a file is the one it was written for, or it is refused in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modpass.errors import StateError, VerificationError
from modpass.exporters.manifest import DataFile, Manifest, RoutedSpec, TensorSpec, manifest_path, versions
from modpass.exporters.sealed import write_sealed
from modpass.files import sha256
from tests.sealing import change


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"onnx bytes")
    return path


def manifest_of(file: Path) -> Manifest:
    return Manifest(
        kind="onnx",
        file=file.name,
        sha256=sha256(file),
        opset=18,
        dtype="float32",
        inputs=(TensorSpec("input_ids", (1, 1024), "int64"),),
        outputs=(TensorSpec("logits", (1, 1024, 64), "float32"),),
        shape={"batch": 1, "sequence": 1024, "dims": {}},
        routed_blocks={"layers.1": RoutedSpec(0.125, 1024, 128, "linear", "expert_choice", "getitem_6")},
        settings={"every": 2},
        versions=versions(),
        parity={"max_abs": 1e-6},
    )


def test_a_saved_manifest_is_read_back_equal_and_is_plain_json(file: Path) -> None:
    manifest = manifest_of(file)
    manifest.save(manifest_path(file))
    assert Manifest.load(manifest_path(file)) == manifest
    raw = json.loads(manifest_path(file).read_text())
    assert raw["schema"] == 2
    assert raw["routed_blocks"]["layers.1"]["k"] == 128
    assert raw["inputs"] == [{"name": "input_ids", "shape": [1, 1024], "dtype": "int64"}]
    assert "flavor" not in raw
    assert "data" not in raw


def test_an_engine_manifest_keeps_its_facts(file: Path) -> None:
    manifest = replace(
        manifest_of(file),
        kind="engine",
        flavor="tensorrt-rtx",
        compute_capabilities=("8.9", "12.0"),
        onnx_sha256="ab",
        build_seconds=1.5,
        bytes=10,
    )
    manifest.save(manifest_path(file))
    assert Manifest.load(manifest_path(file)) == manifest


def test_no_partial_file_is_left_when_a_value_is_not_json(file: Path) -> None:
    with pytest.raises(StateError, match="cannot be written as JSON"):
        replace(manifest_of(file), parity={"max_abs": float("nan")}).save(manifest_path(file))
    assert [p.name for p in file.parent.iterdir()] == ["model.onnx"]


def test_a_changed_file_is_refused(file: Path) -> None:
    manifest = manifest_of(file)
    manifest.check(file)
    file.write_bytes(b"onnx byteS")
    with pytest.raises(VerificationError, match=r"model\.onnx' is not the file its manifest was written for"):
        manifest.check(file)


def test_a_changed_or_missing_data_file_is_refused(file: Path) -> None:
    data = file.with_name("model.onnx.data")
    data.write_bytes(b"weights")
    manifest = replace(manifest_of(file), data=DataFile(data.name, sha256(data)))
    manifest.save(manifest_path(file))
    manifest = Manifest.load(manifest_path(file))
    manifest.check(file)
    data.write_bytes(b"weightS")
    with pytest.raises(VerificationError, match=r"model\.onnx\.data' is not the file"):
        manifest.check(file)
    data.unlink()
    with pytest.raises(VerificationError, match=r"onnx\.data', which its manifest names, cannot be read"):
        manifest.check(file)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"schema": 1}, r"has schema 1, of an older modpass; this one \(.*\) reads schema 2; export the model again"),
        ({"schema": 3}, r"has schema 3, of a newer modpass; this one \(.*\) reads schema 2; install the newer one, or"),
        ({"schema": True}, "has schema True, which is no version"),
        ({"kind": "pickle"}, "kind is 'pickle', allowed are 'onnx' and 'engine'"),
        ({"opset": "18"}, "'opset' must be int, found '18'"),
        ({"opset": True}, "'opset' must be int, found True"),
        (
            {"inputs": [{"name": "x", "shape": ["batch"], "dtype": "int64"}]},
            r"'inputs\[0\]\.shape' must be int, found 'batch'",
        ),
        ({"inputs": [{"name": "x", "shape": [1]}]}, r"misses inputs\[0\]: .*'dtype'"),
        ({"routed_blocks": {"b": 3}}, r"'routed_blocks\['b'\]' must be dict, found 3"),
        ({"routed_blocks": {"b": {"k": 1.5}}}, r"routed_blocks\['b'\]\.k' must be int, found 1\.5"),
        ({"sha": "x"}, "unknown field 'sha'"),
        ({"parity": 3}, "'parity' must be dict or null, found 3"),
        ({"data": {"file": "../x", "sha256": "0"}}, "data.file must be a plain file name"),
        ({"probe": {"file": "/x", "sha256": "0"}}, "probe.file must be a plain file name"),
        ({"compute_capabilities": "8.9"}, "'compute_capabilities' must be list, found '8.9'"),
    ],
)
def test_a_wrong_field_is_named(file: Path, facts: dict[str, Any], message: str) -> None:
    manifest_of(file).save(manifest_path(file))
    change(manifest_path(file), **facts)
    with pytest.raises(StateError, match=message):
        Manifest.load(manifest_path(file))


def test_a_missing_field_a_missing_file_and_broken_json_are_told_apart(file: Path) -> None:
    with pytest.raises(StateError, match=r"there is no manifest .*model\.onnx\.json"):
        Manifest.load(manifest_path(file))
    manifest_path(file).write_text("{")
    with pytest.raises(StateError, match="cannot be read"):
        Manifest.load(manifest_path(file))
    manifest_path(file).write_text("[]")
    with pytest.raises(StateError, match="holds a list, not an object"):
        Manifest.load(manifest_path(file))
    manifest_path(file).write_text('{"schema": 2, "kind": "onnx"}')
    with pytest.raises(StateError, match="does not end with its own digest, so it has been changed"):
        Manifest.load(manifest_path(file))
    write_sealed(manifest_path(file), 2, {"kind": "onnx"})
    with pytest.raises(StateError, match=r"misses fields: .*'file'"):
        Manifest.load(manifest_path(file))


@pytest.mark.parametrize("at", ["indentation", "value", "digest", "end"])
def test_any_changed_byte_of_a_manifest_is_noticed(file: Path, at: str) -> None:
    manifest_of(file).save(manifest_path(file))
    text = manifest_path(file).read_text()
    changed = {
        "indentation": text.replace("\n  ", "\n\t", 1),
        "value": text.replace("1024", "1025", 1),
        "digest": text[:-5] + ("0" if text[-5] != "0" else "1") + text[-4:],
        "end": text + "\n",
    }[at]
    manifest_path(file).write_text(changed)
    with pytest.raises(StateError, match=r"its digest does not fit|does not end with its own digest"):
        Manifest.load(manifest_path(file))


def test_versions_name_what_ran_and_skip_what_is_not_installed() -> None:
    found = versions("tensorrt_rtx", "no_such_module")
    assert found["torch"] == torch.__version__
    assert "no_such_module" not in found
    assert set(found) >= {"modpass", "onnx", "onnxruntime", "tensorrt_rtx"}
