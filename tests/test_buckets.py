"""Buckets: one weights file, results that padding does not change, refusals in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import modpass
from modpass.decode.example import tiny_decoder
from modpass.errors import ExportError, InputError, StateError, VerificationError
from modpass.exporters import BucketManifest, BucketSession, FixedShape, export_buckets, verify
from modpass.exporters.bucket_fit import Fit
from modpass.exporters.padding import find_mask, try_padding
from modpass.exporters.sealed import write_sealed
from tests.sealing import change
from tests.test_transform import routed_pair, set_blocks
from tests.zoo import ZOO, first, make

SIZES = [(1, 12), (3, 24)]


def causal(name: str = "alibi") -> modpass.RoutedModel:
    routed = modpass.mod_transform(make(name), 0.25, selection="causal", example_inputs=ZOO[name].example_inputs())
    set_blocks(routed, 0.25, "linear")
    return routed


def expert(name: str) -> modpass.RoutedModel:
    _, routed = routed_pair(name)
    set_blocks(routed, 0.25, "linear")
    return routed


MODELS: dict[str, Callable[[], modpass.RoutedModel]] = {
    "expert choice with a mask": lambda: expert("bert"),
    "expert choice of a causal model with a mask": lambda: expert("llama"),
    "sequence first, a mask that is true at padding": lambda: expert("encoder-sbd"),
    "causal selection without a mask": causal,
    "dense": lambda: modpass.trace(make("tril-buffer"), ZOO["tril-buffer"].example_inputs()),
}


class Exported:
    """A model, its folder and a session over it."""

    def __init__(self, model: modpass.RoutedModel, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.manifest = export_buckets(model, folder, SIZES)
        self.session = BucketSession(folder, threads=1)

    def request(self, batch: int, sequence: int) -> dict[str, Tensor]:
        """Inputs without the mask."""
        found = {}
        for port in self.manifest.inputs:
            if self.manifest.mask is None or port.name != self.manifest.mask.name:
                shape = [{"batch": batch, "sequence": sequence}[d] if isinstance(d, str) else d for d in port.dims]
                draw = torch.randint(2, 97, shape) if port.dtype == "int64" else torch.randn(shape)  # type: ignore[arg-type]
                found[port.name] = draw
        return found

    def in_torch(self, fit: Fit) -> dict[str, Any]:
        """The model's outputs on the padded inputs, cut back."""
        with torch.no_grad():
            outputs = self.model(**{n: torch.from_numpy(a) for n, a in fit.inputs.items()})
        leaves = [outputs] if isinstance(outputs, Tensor) else list(outputs.values())
        return fit.cut({n: v.numpy() for n, v in zip(self.model.output_names, leaves, strict=True)})


@cache
def exported(name: str, folder: Path) -> Exported:
    return Exported(MODELS[name](), folder / name.replace(" ", "-"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("buckets")


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest, folder: Path) -> Exported:
    return exported(request.param, folder)


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, atol=1e-4 * float(np.abs(wanted).max()), rtol=0)


def take(model: modpass.RoutedModel, whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each block take as many tokens as at the length ``whole``."""
    for block in model.routed_blocks.values():
        monkeypatch.setattr(block, "slots", partial(min, block.slots(whole)))


@pytest.mark.parametrize(("batch", "sequence", "bucket"), [(1, 12, "1x12"), (1, 5, "1x12"), (2, 7, "3x24")])
def test_results_are_those_of_the_model_on_the_padded_request(
    family: Exported, batch: int, sequence: int, bucket: str
) -> None:
    request = family.request(batch, sequence)
    fit = family.session.fit(request)
    assert fit.bucket.label == bucket
    found, wanted = family.session(request), family.in_torch(fit)
    for name, value in wanted.items():
        close(found[name], value)


@pytest.mark.parametrize("length", [1, 9])
def test_padding_changes_nothing_but_the_number_of_slots(
    family: Exported, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = family.request(2, length)
    found = family.session(request)
    take(family.model, 24, monkeypatch)
    if family.manifest.mask is not None:
        mask = family.session.fit(request).inputs[family.manifest.mask.name][:2]
        request[family.manifest.mask.name] = torch.from_numpy(np.full_like(mask, family.manifest.mask.real)[:, :length])
    with torch.no_grad():
        wanted = family.model(**request)
    leaves = [wanted] if isinstance(wanted, Tensor) else list(wanted.values())
    for name, value in zip(family.model.output_names, leaves, strict=True):
        close(found[name], value.numpy())


def test_causal_selection_is_independent_of_the_bucket_where_its_slots_are(folder: Path) -> None:
    model = causal()
    for block in model.routed_blocks.values():
        block.max_sequence = 24
    family = Exported(model, folder / "counted")
    row = torch.randint(97, (1, 11))
    alone = family.session({"ids": row})["output"]
    close(alone, first(model(ids=row)).detach().numpy())
    among = family.session({"ids": torch.cat([torch.randint(97, (1, 11)), row])})["output"][1:]
    close(among, alone)
    assert family.session.fit({"ids": row}).bucket.label == "1x12"


def test_all_buckets_read_one_file_of_weights(folder: Path) -> None:
    family = exported("expert choice with a mask", folder)
    files = {p.name for p in family.folder.iterdir()}
    graphs = {f"{label}.onnx" for label in ("1x12", "3x24")}
    assert files == {*graphs, *(f"{g}.json" for g in graphs), "weights.bin", "buckets.json"}
    parameters = sum(p.numel() * p.element_size() for p in family.model.parameters())
    kept = (family.folder / "weights.bin").stat().st_size  # less what is too small to lie apart
    assert 0.9 * parameters < kept < 1.05 * parameters + 30_000
    assert all((family.folder / g).stat().st_size < parameters / 2 for g in graphs)
    for graph in graphs:
        loaded = onnx.load(family.folder / graph, load_external_data=False)
        where = {e.value for t in loaded.graph.initializer for e in t.external_data if e.key == "location"}
        assert where == {"weights.bin"}
        verify(family.model, family.folder / graph).check(1e-4, 1.0)
    BucketManifest.load(family.folder).check(family.folder)


def test_a_request_may_bring_a_mask_of_its_own(folder: Path) -> None:
    family = exported("expert choice with a mask", folder)
    ids = torch.randint(2, 97, (1, 9))
    mask = torch.ones(1, 9, dtype=torch.int64)
    mask[0, 6:] = 0
    found = family.session({"input_ids": ids, "attention_mask": mask})["last_hidden_state"]
    assert found.shape == (1, 9, 48)
    close(found[:, :6], family.session({"input_ids": ids[:, :6]})["last_hidden_state"])


def test_threads_share_a_session(folder: Path) -> None:
    family = exported("causal selection without a mask", folder)
    requests = [family.request(1 + i % 3, 1 + i) for i in range(20)]
    wanted = [family.session(r)["output"] for r in requests]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda r: family.session(r)["output"], requests))
    assert all(np.array_equal(f, w) for f, w in zip(found, wanted, strict=True))


def test_best_tokens_without_a_mask_take_exact_sizes_alone(folder: Path) -> None:
    family = Exported(expert("alibi"), folder / "exact")
    assert family.session({"ids": torch.randint(97, (2, 24))})["output"].shape == (2, 24, 97), "rows are still added"
    with pytest.raises(InputError, match=r"only take exact sizes \(1x12, 3x24\): block 'blocks.1' takes the best"):
        family.session({"ids": torch.randint(97, (1, 11))})


class Wrapped(nn.Module):
    """A decoder of the zoo, and what is made of its output."""

    def __init__(self, name: str, head: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.head = make(name), head

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits."""
        given = {"input_ids": ids, "attention_mask": attention_mask} if attention_mask is not None else {"ids": ids}
        return self.head(first(self.inner(**given)))


def trial(name: str, head: Callable[[Tensor], Tensor]) -> Any:
    given = {"ids": torch.randint(2, 97, (2, 17))}
    if name == "llama":
        given["attention_mask"] = torch.ones(2, 17, dtype=torch.int64)
    model = modpass.trace(Wrapped(name, head).eval(), given)
    return try_padding(model, [FixedShape(1, 20)], find_mask(model))


def test_a_model_that_reads_its_last_token_is_padded_on_the_left() -> None:
    found = trial("llama", lambda x: x[:, -1])
    assert (found.padding.sequence, found.padding.batch) == ("left", True)
    assert found.outputs == [("batch", 97)]


def test_what_padding_changes_is_found_out() -> None:
    pooled = trial("tril-buffer", lambda x: x.mean(1))
    assert pooled.padding.sequence is None
    assert pooled.padding.why == "padding changes this model's results, and it has no mask to hide it"
    mixed = trial("tril-buffer", lambda x: x + x.mean(0, keepdim=True))
    assert (mixed.padding.sequence, mixed.padding.batch) == ("right", False)
    assert mixed.padding.why == "rows change one another's results"
    flat = trial("tril-buffer", lambda x: x.flatten(0, 1))
    assert flat.outputs == [(None, 97)]
    assert "neither its batch nor its sequence" in flat.padding.why


def test_left_padding_is_cut_on_the_left(folder: Path) -> None:
    given = {"ids": torch.randint(2, 97, (2, 17)), "attention_mask": torch.ones(2, 17, dtype=torch.int64)}
    model = modpass.trace(Wrapped("llama", lambda x: x[:, -1]).eval(), given)
    export_buckets(model, folder / "left", [(2, 16)])
    session = BucketSession(folder / "left", threads=1)
    ids = torch.randint(2, 97, (1, 5))
    fit = session.fit({"ids": ids})
    assert fit.inputs["attention_mask"].tolist() == [[0] * 11 + [1] * 5] * 2
    with torch.no_grad():
        close(session({"ids": ids})["output"], model(ids, torch.ones_like(ids)).numpy())


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ([], r"buckets is \[\]; give pairs"),
        ("1x8", "buckets is '1x8'; give pairs"),
        ([(1, 8), (1, 8)], "the bucket 1x8 is given more than once"),
        ([(1, 8, 2)], r"the bucket \(1, 8, 2\) is no pair"),
        ([8], "the bucket 8 is no pair"),
        ([(0, 8)], "batch is 0; a fixed shape needs a whole number"),
        ([(1, None)], "no size was given for 'sequence'"),
    ],
)
def test_wrong_buckets_are_refused_in_words(buckets: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        export_buckets(tiny_decoder(), tmp_path / "b", buckets)
    assert list(tmp_path.iterdir()) == []


def test_a_mask_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"padding_mask is 'foo', which is no integer or bool input .* ids\['batch'"):
        export_buckets(tiny_decoder(), tmp_path / "b", [(1, 8)], padding_mask="foo")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    export_buckets(tiny_decoder(), tmp_path / "tiny", [(1, 4), (2, 8)])
    return tmp_path / "tiny"


def test_a_folder_is_replaced_only_by_one_that_is_whole(tiny: Path) -> None:
    before = sorted(p.name for p in tiny.iterdir())
    with pytest.raises(ExportError):
        export_buckets(MODELS["dense"](), tiny, [(1, 8), (1, 80)])  # it has 64 places
    assert sorted(p.name for p in tiny.iterdir()) == before
    export_buckets(tiny_decoder(), tiny, [(1, 6)])
    assert {p.name for p in tiny.iterdir()} == {"1x6.onnx", "1x6.onnx.json", "weights.bin", "buckets.json"}
    (tiny.parent / "mine").mkdir()
    (tiny.parent / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="holds other files, which an export would replace"):
        export_buckets(tiny_decoder(), tiny.parent / "mine", [(1, 6)])
    with pytest.raises(InputError, match=r"thesis.tex' is a file; name a folder"):
        export_buckets(tiny_decoder(), tiny.parent / "mine" / "thesis.tex", [(1, 6)])
    assert [p.name for p in tiny.parent.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("name", ["weights.bin", "1x4.onnx"])
def test_a_changed_file_is_not_loaded(name: str, tiny: Path) -> None:
    (tiny / name).write_bytes((tiny / name).read_bytes() + b"x")
    with pytest.raises(VerificationError, match=f"{name}' is not the file that was exported"):
        BucketSession(tiny)
    (tiny / name).unlink()
    with pytest.raises(VerificationError, match=f"{name}' is missing"):
        BucketSession(tiny)


def _with(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda raw: {**raw, **fields}


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no buckets": (_with(buckets=[]), "lists no bucket"),
    "a bucket without a hash": (
        _with(buckets=[{"batch": 1, "sequence": 4, "file": "other.onnx"}]),
        "does not vouch for 'other.onnx'",
    ),
    "a batch of zero": (_with(buckets=[{"batch": 0, "sequence": 4, "file": "1x4.onnx"}]), "must be 1 or more, found 0"),
    "a side that is none": (_with(padding={"sequence": "top", "batch": True}), "allowed are 'right', 'left' and null"),
    "padding of no kind": (_with(padding=None), "'padding' must be dict"),
    "a mask that is no input": (_with(mask={"name": "m", "real": 1}), "the mask 'm' is no input, or not of 0 and 1"),
    "an unknown field": (_with(more=1), "has the unknown field 'more'"),
    "a dim in words": (
        _with(inputs=[{"name": "ids", "dims": ["width"], "dtype": "int64"}]),
        r"'inputs\[0\].dims' must be int",
    ),
    "no inputs": (lambda raw: {k: v for k, v in raw.items() if k != "inputs"}, "'inputs' must be list"),
    "another output": (
        _with(outputs=[{"name": "x", "dims": [], "dtype": "float32"}]),
        "returns output; its manifest says x",
    ),
    "another shape": (
        _with(inputs=[{"name": "ids", "dims": ["sequence", "batch"], "dtype": "int64"}]),
        r"'ids' of '1x4.onnx' is \[1, 4\]; its manifest says \[4, 1\]",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_manifest_is_refused_in_words(name: str, tiny: Path) -> None:
    alter, message = DAMAGE[name]
    raw = {k: v for k, v in json.loads((tiny / "buckets.json").read_text()).items() if k not in ("schema", "digest")}
    write_sealed(tiny / "buckets.json", 1, alter(raw))
    with pytest.raises(StateError, match=message):
        BucketSession(tiny)


def test_a_manifest_that_was_edited_or_leads_out_of_its_folder_is_refused(tiny: Path) -> None:
    path = tiny / "buckets.json"
    raw = json.loads(path.read_text())
    change(path, files={**raw["files"], "../tiny/1x4.onnx": "00"})
    with pytest.raises(VerificationError, match="which leads out of the folder"):
        BucketSession(tiny)
    path.write_text(path.read_text().replace('"right"', '"left"'))
    with pytest.raises(StateError, match="has changed since it was written"):
        BucketSession(tiny)
    path.write_text("{")
    with pytest.raises(StateError, match="cannot be read"):
        BucketSession(tiny)


def test_half_precision_is_served_and_bfloat16_refused(tmp_path: Path) -> None:
    export_buckets(tiny_decoder(), tmp_path / "h", [(1, 8)], dtype="float16")
    assert BucketSession(tmp_path / "h")({"ids": [[1, 2]]})["output"].dtype == np.float16
    export_buckets(tiny_decoder(), tmp_path / "b", [(1, 8)], dtype="bfloat16")
    with pytest.raises(ExportError, match="is in bfloat16, which ONNX Runtime has no kernels for"):
        BucketSession(tmp_path / "b")


def test_an_id_that_the_model_does_not_have_is_refused(tiny: Path) -> None:
    with pytest.raises(InputError, match="ONNX Runtime refuses the request in bucket 1x4"):
        BucketSession(tiny)({"ids": [[1, 99]]})


@pytest.mark.slow
def test_images_have_buckets_of_rows_alone(tmp_path: Path) -> None:
    family = expert("dinov2")
    export_buckets(family, tmp_path / "b", [(1, None), (3, None)], dims={"pixel_values.2": 56})
    images = torch.randn(2, 3, 56, 56)
    session = BucketSession(tmp_path / "b")
    assert session.fit({"pixel_values": images}).bucket.label == "3"
    with torch.no_grad():
        close(session({"pixel_values": images})["last_hidden_state"], first(family(images)).numpy())
    with pytest.raises(InputError, match=r"were exported for \['batch', 3, 56, 56\]"):
        session({"pixel_values": torch.randn(1, 3, 28, 28)})
