"""Triton repositories: read back by the published schema, loaded in ONNX Runtime, refused in words."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from google.protobuf import text_format
from torch import Tensor, nn

import modpass
from modpass.decode.example import tiny_decoder
from modpass.errors import ExportError, InputError, StateError, VerificationError
from modpass.exporters import BucketSession, FixedShape, Manifest, export_buckets, export_onnx, export_triton, verify
from modpass.exporters.manifest import TensorSpec, manifest_path
from modpass.exporters.triton import check_repository
from modpass.exporters.triton_config import Instances, config_text
from modpass.exporters.verdict import verdict
from modpass.files import sha256
from tests.sealing import change

SHAPES = [(1, 4), (1, 8), (2, 8)]
NUMPY = {"TYPE_INT64": np.int64, "TYPE_FP32": np.float32, "TYPE_FP16": np.float16, "TYPE_BOOL": np.bool_}
ONNX = {"TYPE_INT64": "tensor(int64)", "TYPE_FP32": "tensor(float)", "TYPE_FP16": "tensor(float16)"}


class Masked(nn.Module):
    """A model of ids and a mask, large enough to have weights to share, with an output that has no dim."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(29, 32), nn.Linear(32, 32)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        x = x + self.linear(x) * attention_mask[..., None]
        return {"hidden": x, "tokens": attention_mask.sum()}


def traced() -> modpass.RoutedModel:
    mask = torch.ones(2, 5, dtype=torch.int64)
    return modpass.trace(Masked().eval(), {"ids": torch.arange(10).view(2, 5), "attention_mask": mask})


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("triton") / "masked"
    torch.manual_seed(0)
    export_buckets(traced(), folder, SHAPES)
    return folder


@pytest.fixture(scope="module")
def repository(buckets: Path) -> Path:
    target = buckets.parent / "repository"
    assert export_triton(buckets, target, instances=2, kind="cpu", threads=1) == [f"masked_{b}x{s}" for b, s in SHAPES]
    return target


@cache
def schema() -> Any:
    """The classes of Triton's protobuf schema, from the file of its client alone, which needs much else."""
    package = importlib.util.find_spec("tritonclient")
    if package is None or not package.submodule_search_locations:
        pytest.skip("pip install --no-deps tritonclient")
    path = Path(package.submodule_search_locations[0], "grpc", "model_config_pb2.py")
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parsed(text: str) -> Any:
    return text_format.Parse(text, schema().ModelConfig())


def word(message: Any, field: str) -> str:
    """The name of an enumeration's value."""
    value: str = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number[getattr(message, field)].name
    return value


def sample(config: Any, directory: Path) -> dict[str, np.ndarray]:
    """What the warm-up feeds."""
    (warmup,) = config.model_warmup
    assert warmup.batch_size == 1
    found = {}
    for name, given in warmup.inputs.items():
        dtype = NUMPY[word(given, "data_type")]
        if given.WhichOneof("input_data_type") == "input_data_file":
            found[name] = np.fromfile(directory / "warmup" / given.input_data_file, dtype).reshape(given.dims)
        else:
            assert given.zero_data
            found[name] = np.zeros(given.dims, dtype)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_each_model_is_what_its_config_says(shape: tuple[int, int], repository: Path) -> None:
    directory = repository / "masked_{}x{}".format(*shape)
    config = parsed((directory / "config.pbtxt").read_text())
    assert (config.name, config.platform, config.max_batch_size) == (directory.name, "onnxruntime_onnx", 0)
    assert [(g.count, word(g, "kind")) for g in config.instance_group] == [(2, "KIND_CPU")]
    assert config.parameters["intra_op_thread_count"].string_value == "1"
    session = onnxruntime.InferenceSession(directory / "1" / config.default_model_filename)
    for given, values in ((config.input, session.get_inputs()), (config.output, session.get_outputs())):
        assert [g.name for g in given] == [v.name for v in values]
        for entry, value in zip(given, values, strict=True):
            dims = list(entry.reshape.shape) if entry.HasField("reshape") else list(entry.dims)
            assert (dims, ONNX[word(entry, "data_type")]) == (value.shape, value.type)
            assert entry.dims, "Triton asks for one dim at least"
    assert [list(i.dims) for i in config.input] == [list(shape), list(shape)]
    feed = sample(config, directory)
    assert feed["attention_mask"].all()
    hidden, tokens = session.run(None, feed)
    assert hidden.shape == (*shape, 32)
    assert tokens == shape[0] * shape[1]


def test_weights_lie_in_each_version_and_once_on_the_disk(buckets: Path, repository: Path) -> None:
    weights = [repository / "masked_{}x{}".format(*s) / "1" / "weights.bin" for s in SHAPES]
    assert len({os.stat(w).st_ino for w in weights}) == 1
    assert os.stat(weights[0]).st_ino != os.stat(buckets / "weights.bin").st_ino, "the folder may change"
    assert sha256(weights[0]) == sha256(buckets / "weights.bin")
    assert weights[0].stat().st_size >= (29 * 32 + 32 * 32) * 4


def test_where_there_are_no_hard_links_weights_are_copied(
    buckets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    export_triton(buckets, tmp_path / "r")
    weights = [*(tmp_path / "r").glob("*/1/weights.bin")]
    assert len({os.stat(w).st_ino for w in weights}) == 3
    assert len({sha256(w) for w in weights}) == 1


def test_a_repository_is_a_folder_of_buckets_too(buckets: Path, repository: Path) -> None:
    there, here = BucketSession(repository, threads=1), BucketSession(buckets, threads=1)
    for length in (3, 7):
        request = {"ids": np.arange(length)[None]}
        assert there.fit(request).bucket.file == f"masked_{here.fit(request).bucket.label}/1/model.onnx"
        found, wanted = there(request), here(request)
        assert all(np.array_equal(found[n], wanted[n]) for n in wanted)


def test_every_file_that_is_served_is_hashed(repository: Path, tmp_path: Path) -> None:
    facts = json.loads((repository / "triton.json").read_text())
    assert (facts["schema"], facts["kind"]) == (1, "triton")
    assert set(facts["models"]) == {p.name for p in repository.iterdir() if p.is_dir()}
    files = {p.relative_to(repository).as_posix() for p in repository.rglob("*") if p.is_file()}
    assert set(facts["files"]) == {f for f in files if not f.endswith(".json")}
    assert check_repository(repository) == 3 * len(
        ["model.onnx", "weights.bin", "config.pbtxt", "warmup/attention_mask"]
    )
    for model in repository.glob("*/1/model.onnx"):
        Manifest.load(manifest_path(model)).check(model)


def test_models_that_were_verified_are_verified_again_where_they_are_served(tmp_path: Path) -> None:
    model = traced()
    export_buckets(model, tmp_path / "b", [(1, 4)])
    verify(model, tmp_path / "b" / "1x4.onnx").check()
    export_triton(tmp_path / "b", tmp_path / "r")
    found = verdict(tmp_path / "r").check()
    assert [c.result for c in found.checks if c.name == "parity"] == ["passed"]


def test_verify_finds_what_was_changed(buckets: Path, tmp_path: Path) -> None:
    export_triton(buckets, tmp_path / "r")
    found = verdict(tmp_path / "r").check()
    assert {c.name for c in found.checks if c.file in ("buckets.json", "triton.json")} == {"hashes"}
    config = tmp_path / "r" / "masked_1x4" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 0", "max_batch_size: 8"))
    with pytest.raises(VerificationError, match=r"config.pbtxt' is not the file that was exported"):
        verdict(tmp_path / "r").check()
    with pytest.raises(VerificationError, match=r"config.pbtxt' is not the file that was exported"):
        check_repository(tmp_path / "r")


def test_without_a_warm_up_there_is_none(buckets: Path, tmp_path: Path) -> None:
    export_triton(buckets, tmp_path / "r", "plain", warmup=False)
    config = parsed((tmp_path / "r" / "plain_1x4" / "config.pbtxt").read_text())
    assert (len(config.model_warmup), len(config.parameters), word(config.instance_group[0], "kind")) == (
        0,
        0,
        "KIND_AUTO",
    )
    assert not (tmp_path / "r" / "plain_1x4" / "warmup").exists()


def test_one_file_is_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modpass.exporters.onnx.EXTERNAL_ABOVE", 100)
    export_onnx(tiny_decoder(), tmp_path / "tiny.onnx", FixedShape(1, 6))
    assert export_triton(tmp_path / "tiny.onnx", tmp_path / "r") == ["tiny_1x6"]
    config = parsed((tmp_path / "r" / "tiny_1x6" / "config.pbtxt").read_text())
    session = onnxruntime.InferenceSession(tmp_path / "r" / "tiny_1x6" / "1" / "model.onnx")
    assert session.run(None, sample(config, tmp_path))[0].shape == (1, 6, 11)
    assert not (tmp_path / "r" / "buckets.json").exists()


def engine(path: Path, flavor: str, batch: int = 1) -> Path:
    """What stands for an engine: Triton reads its bytes, and this its manifest."""
    path.write_bytes(b"plan")
    spec = (TensorSpec("ids", (batch, 8), "int64"),)
    shape = {"batch": batch, "sequence": 8, "dims": {}}
    manifest = Manifest("engine", path.name, sha256(path), 18, "bfloat16", spec, spec, shape, flavor=flavor)
    manifest.save(manifest_path(path))
    return path


def test_engines_are_plans(tmp_path: Path) -> None:
    engines = [engine(tmp_path / f"{b}.engine", "tensorrt", b) for b in (1, 2)]
    assert export_triton(engines, tmp_path / "r", "m", threads=4, kind="gpu") == ["m_1x8", "m_2x8"]
    config = parsed((tmp_path / "r" / "m_2x8" / "config.pbtxt").read_text())
    assert (config.platform, config.default_model_filename) == ("tensorrt_plan", "model.plan")
    assert (list(config.input[0].dims), len(config.parameters)) == ([2, 8], 0)
    assert (tmp_path / "r" / "m_2x8" / "1" / "model.plan").read_bytes() == b"plan"
    with pytest.raises(
        ExportError, match="is an engine of tensorrt-rtx, which Triton's TensorRT backend does not load"
    ):
        export_triton(engine(tmp_path / "x.engine", "tensorrt-rtx"), tmp_path / "x")
    with pytest.raises(InputError, match="kind is 'cpu', but an engine runs on a GPU"):
        export_triton(engines, tmp_path / "x", kind="cpu")
    stripped = engine(tmp_path / "s.engine", "tensorrt")
    change(manifest_path(stripped), stripped=True)
    with pytest.raises(ExportError, match="is an engine without its weights, which Triton cannot put back"):
        export_triton(stripped, tmp_path / "x")
    with pytest.raises(InputError, match="two files have the shape of 'm_1x8'"):
        export_triton([engines[0], engines[0]], tmp_path / "x", "m")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"instances": 0}, "instances is 0; it must be a whole number of 1 or more"),
        ({"instances": True}, "instances is True"),
        ({"threads": 1.5}, "threads is 1.5; it must be a whole"),
        ({"kind": "tpu"}, "kind is 'tpu'; it must be one of 'auto', 'cpu', 'gpu'"),
        ({"name": "a/b"}, "name is 'a/b'; a model's is of letters"),
        ({"name": ""}, "name is ''"),
    ],
)
def test_wrong_arguments_are_refused_in_words(
    options: dict[str, Any], message: str, buckets: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        export_triton(buckets, tmp_path / "r", **options)
    assert list(tmp_path.iterdir()) == []


def test_sources_that_are_none_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file '.*absent.onnx'"):
        export_triton(tmp_path / "absent.onnx", tmp_path / "r")
    with pytest.raises(StateError, match="is no folder of buckets"):
        export_triton(tmp_path, tmp_path / "r")
    with pytest.raises(InputError, match="no file was given"):
        export_triton([], tmp_path / "r")
    (tmp_path / "bare.onnx").write_bytes(b"x")
    with pytest.raises(StateError, match="there is no manifest"):
        export_triton(tmp_path / "bare.onnx", tmp_path / "r")
    export_onnx(tiny_decoder(), tmp_path / "b.onnx", FixedShape(1, 6), dtype="bfloat16")
    with pytest.raises(ExportError, match="is in bfloat16, which ONNX Runtime has no kernels for"):
        export_triton(tmp_path / "b.onnx", tmp_path / "r")
    engine(tmp_path / "e.engine", "tensorrt").write_bytes(b"other")
    with pytest.raises(VerificationError, match="is not the file its manifest was written for"):
        export_triton(tmp_path / "e.engine", tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_only_a_repository_of_modpass_is_replaced(buckets: Path, tmp_path: Path) -> None:
    (tmp_path / "r" / "other_model" / "1").mkdir(parents=True)
    with pytest.raises(InputError, match="holds other files, which an export would replace"):
        export_triton(buckets, tmp_path / "r")
    export_triton(buckets, tmp_path / "mine")
    assert len(export_triton(buckets, tmp_path / "mine", "second")) == 3
    assert {p.name for p in (tmp_path / "mine").iterdir() if p.is_dir()} == {f"second_{b}x{s}" for b, s in SHAPES}


def test_names_with_quotes_and_letters_of_any_script_are_kept() -> None:
    spec = TensorSpec('i"d\\s\n', (1, 2), "bool")
    specs = (spec, replace(spec, name="größe", dtype="uint8"))
    text = config_text("m", "onnxruntime_onnx", specs, (), file="model.onnx", instances=Instances(), warmup={})
    config = parsed(text)
    assert [i.name for i in config.input] == ['i"d\\s\n', "größe"]
    assert set(config.model_warmup[0].inputs) == {'i"d\\s\n', "größe"}


def test_a_dtype_that_triton_lacks_is_refused() -> None:
    with pytest.raises(ExportError, match="'q' is float8e4m3fn, which Triton has no type for"):
        config_text("m", "x", (TensorSpec("q", (1,), "float8e4m3fn"),), (), file="f", instances=Instances())
