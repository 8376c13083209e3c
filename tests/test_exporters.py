"""ONNX files: static, equal to torch in values and choices, whole or absent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

import modpass
from modpass.errors import ExportError, InputError, StateError, VerificationError
from modpass.exporters import FixedShape, Manifest, export_onnx, manifest_path, verify
from modpass.exporters.conversion import as_onnx
from modpass.exporters.static_graph import open_dims
from tests.test_transform import inputs_of, routed_pair, set_blocks
from tests.zoo import ZOO, make

NAMES = list(ZOO)
DYNAMIC = {"If", "Loop", "Scan", "NonZero", "Compress", "Unique"}


def shape_of(name: str) -> FixedShape:
    return FixedShape(2, dims={"pixel_values.2": 56}) if name == "dinov2" else FixedShape(2, 24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("onnx")


@pytest.fixture(scope="module", params=NAMES)
def exported(request: pytest.FixtureRequest, folder: Path) -> tuple[str, Path, Manifest]:
    _, routed = routed_pair(request.param)
    set_blocks(routed, 0.25, "linear")
    path = folder / f"{request.param}.onnx"
    return request.param, path, export_onnx(routed, path, shape_of(request.param))


def test_onnx_equals_torch_in_values_and_token_choices(exported: tuple[str, Path, Manifest]) -> None:
    name, path, _ = exported
    _, routed = routed_pair(name)
    set_blocks(routed, 0.25, "linear")
    report = verify(routed, path).check(1e-4, 1.0)
    assert set(report.choices) == set(routed.routed_blocks)
    assert Manifest.load(manifest_path(path)).parity is not None


@pytest.mark.parametrize("name", [n for n in NAMES if n in ("llama", "alibi", "dinov2", "encoder")])
def test_where_every_token_is_taken_nothing_is_gathered(name: str, tmp_path: Path) -> None:
    dense, routed = routed_pair(name)
    set_blocks(routed, 1.0, "linear")
    path = tmp_path / "all.onnx"
    export_onnx(routed, path, shape_of(name))
    assert set(verify(routed, path).check(1e-4, 1.0).choices.values()) == {1.0}
    kinds = [n.op_type for n in onnx.load(path).graph.node]
    assert not {"TopK", "ScatterElements"} & set(kinds)
    plain, _ = as_onnx(modpass.trace(dense, ZOO[name].example_inputs()), shape_of(name))
    assert kinds.count("GatherND") == sum(n.op_type == "GatherND" for n in plain.graph.all_nodes())


def test_every_dim_of_every_value_is_an_integer(exported: tuple[str, Path, Manifest]) -> None:
    name, path, manifest = exported
    model = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True)
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    named = {o for n in model.graph.node for o in n.output}
    assert named <= {v.name for v in values}, "a value without a shape"
    for value in values:
        assert all(d.HasField("dim_value") for d in value.type.tensor_type.shape.dim), value.name
    onnx.checker.check_model(model, full_check=True)
    assert open_dims(ir.load(path)) == []
    assert all(isinstance(d, int) for t in (*manifest.inputs, *manifest.outputs) for d in t.shape)
    assert manifest.inputs[0].shape[0] == (24 if name == "encoder-sbd" else 2)


def test_graphs_hold_no_dynamic_operator_no_scatter_reduction_and_no_source_path(
    exported: tuple[str, Path, Manifest],
) -> None:
    _, path, _ = exported
    model = onnx.load(path)
    assert not {n.op_type for n in model.graph.node} & DYNAMIC
    for node in model.graph.node:
        if node.op_type.startswith("Scatter"):
            assert all(a.s in (b"", b"none") for a in node.attribute if a.name == "reduction")
    content = path.read_bytes()
    places = re.findall(rb"([^\s\x00-\x1f]*)\.py:\d+", content)
    assert content.count(b".py") == len(places)
    assert not any(b"/" in p or b"\\" in p for p in places), "names of files, not their paths"
    assert str(Path.home()).encode() not in content


def test_scores_and_topk_stay_float32_in_half_precision(folder: Path) -> None:
    _, routed = routed_pair("llama")
    set_blocks(routed, 0.25, "linear")
    for dtype, code in (("float16", ir.DataType.FLOAT16), ("bfloat16", ir.DataType.BFLOAT16)):
        graph, _ = as_onnx(routed, FixedShape(1, 24), dtype=dtype)  # type: ignore[arg-type]
        scored = [n.inputs[0].dtype for n in graph.graph if n.op_type == "TopK"]
        assert set(scored) == {ir.DataType.FLOAT, ir.DataType.INT64}
        assert graph.graph.initializers["model.model.layers.1.router.weight"].dtype == ir.DataType.FLOAT
        sizes = {ir.DataType.FLOAT: 0, code: 0}
        for value in graph.graph.initializers.values():
            if value.dtype in sizes and value.const_value is not None:
                sizes[value.dtype] += value.const_value.size
        assert sizes[code] > 20 * sizes[ir.DataType.FLOAT], "nearly all weights are in half precision"


def test_tied_weights_are_stored_once(folder: Path) -> None:
    model, routed = routed_pair("llama")
    path = folder / "tied.onnx"
    export_onnx(routed, path, FixedShape(1, 8))
    unique = {p.data_ptr(): p.numel() for p in model.parameters()}
    assert path.stat().st_size < 1.05 * 4 * sum(unique.values()) + 200_000


def test_a_dense_module_is_exported_through_the_same_path(folder: Path) -> None:
    model = make("bert")
    manifest = export_onnx(model, folder / "dense.onnx", FixedShape(1, 12))
    assert manifest.routed_blocks == {}
    assert [o.name for o in manifest.outputs] == ["last_hidden_state", "pooler_output"]
    verify(model, folder / "dense.onnx").check()


def test_weights_above_the_limit_go_to_a_data_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modpass.exporters.onnx.EXTERNAL_ABOVE", 10_000)
    _, routed = routed_pair("gpt2")
    path = folder / "large.onnx"
    manifest = export_onnx(routed, path, FixedShape(1, 12))
    assert manifest.data is not None
    assert (folder / "large.onnx.data").stat().st_size > path.stat().st_size / 10
    verify(routed, path).check()
    data = bytearray((folder / "large.onnx.data").read_bytes())
    data[100] ^= 1
    (folder / "large.onnx.data").write_bytes(bytes(data))
    with pytest.raises(VerificationError, match="is not the file its manifest was written for"):
        verify(routed, path)


def test_two_exports_are_the_same_bytes(folder: Path) -> None:
    _, routed = routed_pair("encoder")
    digests = [export_onnx(routed, folder / "same.onnx", FixedShape(1, 12)).sha256 for _ in range(2)]
    assert digests[0] == digests[1]


def test_verify_sees_a_file_that_computes_something_else(folder: Path) -> None:
    model, routed = routed_pair("tril-buffer")
    export_onnx(routed, folder / "other.onnx", FixedShape(1, 12))
    other = modpass.mod_transform(model, 0.5, example_inputs=ZOO["tril-buffer"].example_inputs(), gate="unit")
    with pytest.raises(VerificationError, match="output 'output' is off by"):
        verify(other, folder / "other.onnx").check()


def test_a_changed_file_is_not_run(folder: Path) -> None:
    _, routed = routed_pair("tril-buffer")
    path = folder / "changed.onnx"
    export_onnx(routed, path, FixedShape(1, 12))
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(VerificationError, match="is not the file its manifest was written for"):
        verify(routed, path)
    manifest_path(path).unlink()
    with pytest.raises(StateError, match="there is no manifest"):
        verify(routed, path)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (FixedShape(1), {}, "no size was given for 'sequence'; give sequence= a number"),
        (FixedShape(1, 8, {"foo": 3}), {}, "the model has no dim 'foo'; it has: batch, sequence"),
        (FixedShape(1, 8), {"opset": 17}, "opset is 17; allowed are 18 to 20"),
        (FixedShape(1, 8), {"dtype": "int8"}, "dtype is 'int8'; allowed are"),
    ],
)
def test_wrong_arguments_are_refused_in_words(
    folder: Path, shape: FixedShape, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        export_onnx(routed_pair("llama")[1], folder / "no.onnx", shape, **options)
    assert not (folder / "no.onnx").exists()


def test_a_sequence_that_follows_from_the_image_is_left_out() -> None:
    with pytest.raises(InputError, match="sequence is 257, but this model's sequence follows from its input sizes"):
        as_onnx(routed_pair("dinov2")[1], FixedShape(1, 257, {"pixel_values.2": 56}))


@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_sizes_are_positive_whole_numbers(size: Any) -> None:
    with pytest.raises(InputError, match="a fixed shape needs a whole number of 1 or more"):
        FixedShape(size, 8)


def test_stochastic_selection_is_not_exported(folder: Path) -> None:
    model = routed_pair("encoder")[0]
    routed = modpass.mod_transform(model, 0.5, selection="stochastic", example_inputs=(torch.randn(2, 9, 48),))
    with pytest.raises(ExportError, match=r"block 'layers\.1' selects by noise"):
        export_onnx(routed, folder / "no.onnx", FixedShape(1, 8))


def test_an_older_file_survives_an_export_that_fails(folder: Path) -> None:
    class Sorter(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sort(dim=1, stable=True, descending=True).values.nonzero()

    path = folder / "older.onnx"
    path.write_text("older")
    with pytest.raises(modpass.ModpassError):
        export_onnx(modpass.trace(Sorter(), (torch.randn(2, 5),)), path, FixedShape(1, 8))
    assert path.read_text() == "older"
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []


def test_half_precision_in_onnx_runtime_is_close(folder: Path) -> None:
    _, routed = routed_pair("gpt2")
    set_blocks(routed, 0.25, "linear")
    path = folder / "half.onnx"
    assert export_onnx(routed, path, FixedShape(2, 24), dtype="float16").dtype == "float16"
    report = verify(routed, path, inputs={k: v[:2] for k, v in inputs_of("gpt2", 2, 24).items()})
    assert report.outputs[0].max_rel < 1e-2
    assert min(report.choices.values()) > 0.9
    assert np.isfinite(report.outputs[0].max_abs)


def test_outputs_keep_their_names_past_one_that_is_none(folder: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = routed_pair("encoder")[0]

        def forward(self, x: Tensor) -> dict[str, Tensor | None]:
            return {"loss": None, "logits": self.inner(x), "x": x * 2}

    model = modpass.mod_transform(Named().eval(), 0.5, example_inputs=(torch.randn(2, 9, 48),))
    manifest = export_onnx(model, folder / "named.onnx", FixedShape(1, 8))
    assert [o.name for o in manifest.outputs] == ["logits", "x.out"]
    verify(model, folder / "named.onnx").check()


def test_a_sequence_that_the_model_cannot_take_is_refused_with_its_cause(folder: Path) -> None:
    with pytest.raises(ExportError, match=r"torch cannot lower this model at ids \[1, 80\]"):
        export_onnx(routed_pair("tril-buffer")[1], folder / "no.onnx", FixedShape(1, 80))


class Lettered(nn.Module):
    """Its inputs have capital letters in their names."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x_BSD: torch.Tensor, Scale: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(x_BSD * Scale)
        return made


@pytest.mark.parametrize("exported", [False, True])
def test_inputs_keep_capital_letters_in_their_names(tmp_path: Path, exported: bool) -> None:
    model, inputs = Lettered().eval(), (torch.randn(2, 9, 8), torch.rand(2, 9, 8))
    free = tuple({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO} for _ in inputs)
    source = torch.export.export(model, inputs, dynamic_shapes=free) if exported else model
    shape = FixedShape(2, 9)
    routed = modpass.mod_transform(source, 0.5, every=1, example_inputs=None if exported else inputs)
    assert [i.name for i in routed.inputs] == ["x_BSD", "Scale"]
    assert routed(x_BSD=inputs[0], Scale=inputs[1]).shape == (2, 9, 8)
    manifest = export_onnx(routed, tmp_path / "m.onnx", shape)
    assert [i.name for i in manifest.inputs] == ["x_BSD", "Scale"]
    verify(routed, tmp_path / "m.onnx").check()
