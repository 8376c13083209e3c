"""The chooser: which bucket a request runs in, what is padded, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modpass.errors import InputError
from modpass.exporters.bucket_fit import fit
from modpass.exporters.bucket_manifest import Bucket, BucketManifest, Mask, Padding, Port

SIZES = [(1, 16), (1, 64), (4, 16), (8, 64)]
MANIFEST = BucketManifest(
    "float32",
    (
        Port("ids", ("batch", "sequence"), "int64"),
        Port("mask", ("batch", "sequence"), "bool"),
        Port("x", ("sequence", "batch", 3), "float32"),
    ),
    (Port("y", ("batch", "sequence", 2), "float32"), Port("pooled", ("batch", 2), "float32")),
    Mask("mask", 1),
    Padding("right", True),
    tuple(Bucket(b, s, f"{b}x{s}.onnx") for b, s in SIZES),
    {},
)


def request(batch: int, sequence: int, **others: Any) -> dict[str, Any]:
    ids = np.arange(batch * sequence).reshape(batch, sequence)
    return {"ids": ids, "x": np.zeros((sequence, batch, 3)), **others}


@pytest.mark.parametrize(
    ("batch", "sequence", "label"),
    [
        (1, 1, "1x16"),
        (1, 16, "1x16"),
        (1, 17, "1x64"),
        (2, 3, "4x16"),
        (4, 16, "4x16"),
        (5, 1, "8x64"),
        (8, 64, "8x64"),
    ],
)
def test_the_bucket_with_the_fewest_tokens_that_fits_is_chosen(batch: int, sequence: int, label: str) -> None:
    assert fit(MANIFEST, request(batch, sequence)).bucket.label == label


def test_of_two_with_as_many_tokens_the_shorter_is_chosen() -> None:
    manifest = replace(MANIFEST, buckets=(Bucket(1, 64, "a"), Bucket(4, 16, "b")))
    assert fit(manifest, request(1, 9)).bucket.file == "b"


@given(batch=st.integers(1, 8), sequence=st.integers(1, 64), side=st.sampled_from(["right", "left"]))
def test_what_is_cut_is_what_was_padded(batch: int, sequence: int, side: str) -> None:
    manifest = replace(MANIFEST, padding=Padding(side, True))
    found = fit(manifest, request(batch, sequence))
    shapes = {p.name: p.shape(found.bucket) for p in manifest.inputs}
    assert {n: a.shape for n, a in found.inputs.items()} == shapes
    assert int(found.inputs["mask"].sum()) == found.bucket.batch * sequence
    ids = found.inputs["ids"]
    outputs = {"y": np.stack([ids, ids], -1), "pooled": ids[:, -1:], "more": ids}
    cut = found.cut(outputs)
    assert np.array_equal(cut["y"][..., 0], request(batch, sequence)["ids"])
    assert cut["pooled"].shape == (batch, 1)
    assert (ids[:, 0] == ids[:, -sequence]).all() if side == "left" else (ids[:, -1] == ids[:, sequence - 1]).all()


def test_sizes_that_may_not_grow_are_kept() -> None:
    tokens = replace(MANIFEST, padding=Padding(None, True, "the reason"))
    assert fit(tokens, request(2, 64)).bucket.label == "8x64"
    with pytest.raises(
        InputError, match=r"has 2 rows of 63 tokens, and these files only take exact sizes .*: the reason"
    ):
        fit(tokens, request(2, 63))
    rows = replace(MANIFEST, padding=Padding("right", False, "rows meet"))
    assert fit(rows, request(4, 3)).bucket.label == "4x16"
    assert fit(rows, request(1, 3)).bucket.label == "1x16"
    with pytest.raises(InputError, match="rows meet"):
        fit(rows, request(2, 3))


def test_inputs_may_be_lists_and_tensors_of_another_width() -> None:
    found = fit(MANIFEST, {"ids": [[1, 2]], "x": torch.zeros(2, 1, 3, dtype=torch.float64), "mask": [[1, 0]]})
    assert found.inputs["ids"].dtype == np.int64
    assert found.inputs["x"].dtype == np.float32
    assert found.inputs["mask"].tolist() == [[True, False] + [False] * 14]


REFUSED: dict[str, tuple[Any, str]] = {
    "no mapping": ([[1]], "a request is a list; give the inputs by name"),
    "nothing": ({}, "the input 'ids' is missing; the inputs are: ids, mask, x"),
    "None": (request(1, 4, ids=None), "the input 'ids' is missing"),
    "an unknown input": (request(1, 4, labels=[[1]]), "there is no input 'labels'; the inputs are"),
    "too long": (request(1, 65), "has 1 row of 65 tokens; the largest buckets hold less, there are 1x16, 1x64"),
    "too many rows": (request(9, 1), "has 9 rows of 1 tokens; the largest"),
    "no rows": (request(0, 4), r"'ids' is \[0, 4\] of int64; it must be \[batch, sequence\] of int64, each size 1"),
    "no tokens": (request(1, 0), r"'ids' is \[1, 0\]"),
    "one dim": (request(1, 4, ids=[1, 2, 3, 4]), r"'ids' is \[4\]"),
    "ragged": (request(1, 4, ids=[[1], [1, 2]]), "'ids' cannot be made an array"),
    "floats as ids": (request(1, 4, ids=[[1.0] * 4]), r"'ids' is \[1, 4\] of float64; it must be"),
    "words": (request(1, 4, ids=[["a"] * 4]), "'ids' is"),
    "objects": (request(1, 4, ids=[[None] * 4]), r"'ids' is \[1, 4\] of object"),
    "a tensor with a gradient": (
        request(1, 4, x=torch.zeros(4, 1, 3, requires_grad=True)),
        "'x' cannot be made an array",
    ),
    "another width": (request(1, 4, x=np.zeros((4, 1, 2))), r"'x' is \[4, 1, 2\]; the files were exported for"),
    "two lengths": (request(1, 4, x=np.zeros((5, 1, 3))), "'x' has sequence 5, but 'ids' has 4"),
    "two batches": (request(2, 4, mask=np.ones((1, 4), bool)), "'mask' has batch 1, but 'ids' has 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_requests_that_do_not_fit_are_refused_in_words(name: str) -> None:
    inputs, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        fit(MANIFEST, inputs)


def test_an_output_that_is_missing_is_named() -> None:
    with pytest.raises(InputError, match="the output 'pooled' is missing; given are: y"):
        fit(MANIFEST, request(1, 4)).cut({"y": np.zeros((1, 16, 2))})
