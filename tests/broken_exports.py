"""Sound exports of tiny models, and ways to break them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import modpass
from modpass.decode.example import tiny_decoder
from modpass.exporters import FixedShape, build_engine, export_decoder, export_onnx, verify
from modpass.exporters import onnx as onnx_exporter
from modpass.exporters.manifest import DataFile, Manifest, manifest_path
from modpass.files import sha256
from tests.sealing import change

Break = Callable[[Path], object]


class Block(nn.Module):
    """A block of an MLP alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(19, 8), nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


class Tokenizer:
    """Writes a file, as tokenizers do."""

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "tokenizer.json").write_text('{"model": "none"}')


def encoder() -> modpass.RoutedModel:
    torch.manual_seed(0)
    ids = (torch.arange(18).reshape(2, 9) % 19,)
    return modpass.mod_transform(Encoder().eval(), 0.5, example_inputs=ids)


def sound(folder: Path) -> Path:
    """An export with weights beside it and an engine, another one, and a decoder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_exporter, "EXTERNAL_ABOVE", 0)
        export_onnx(encoder(), folder / "m.onnx", FixedShape(1, 8))
    verify(encoder(), folder / "m.onnx").check()
    build_engine(folder / "m.onnx", folder / "m.engine", progress=False)
    other = folder / "other"
    other.mkdir()
    export_onnx(encoder(), other / "m.onnx", FixedShape(1, 6))
    torch.manual_seed(0)
    export_decoder(tiny_decoder(True), folder / "decoder", prompt=4, max_sequence=12, tokenizer=Tokenizer())
    return folder


# Ways to break a file


def cut(name: str, keep: int = 100) -> Break:
    return lambda folder: os.truncate(folder / name, keep)


def flip(name: str, at: float = 0.5) -> Break:
    """Change one bit at this share of the file."""

    def do(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[int(at * (len(content) - 1))] ^= 1
        (folder / name).write_bytes(content)

    return do


def put(name: str, content: bytes | str) -> Break:
    """Replace the file by other bytes, or by those of another file."""

    def do(folder: Path) -> None:
        (folder / name).write_bytes((folder / content).read_bytes() if isinstance(content, str) else content)

    return do


def drop(name: str) -> Break:
    return lambda folder: (folder / name).unlink()


def swap(one: str, two: str) -> Break:
    def do(folder: Path) -> None:
        first, second = (folder / one).read_bytes(), (folder / two).read_bytes()
        (folder / one).write_bytes(second)
        (folder / two).write_bytes(first)

    return do


def replaced(name: str, old: str, new: str) -> Break:
    def do(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return do


def facts(name: str, **changed: Any) -> Break:
    """Other facts under a digest that fits."""
    return lambda folder: change(folder / name, **changed)


def fact(name: str, *where: str, value: Any) -> Break:
    """Another fact deep inside, under a digest that fits."""

    def do(folder: Path) -> None:
        raw = json.loads((folder / name).read_text())
        inner = raw
        for key in where[:-1]:
            inner = inner[key]
        inner[where[-1]] = value
        change(folder / name, **{where[0]: raw[where[0]]})

    return do


def outward(name: str) -> Break:
    """The file as a link to a copy of it outside of the folder."""

    def do(folder: Path) -> None:
        outside = folder.parent / "outside"
        outside.write_bytes((folder / name).read_bytes())
        (folder / name).unlink()
        (folder / name).symlink_to(outside)

    return do


def graph(edit: Callable[[onnx.ModelProto], object]) -> Break:
    """Another graph under a hash and a digest that fit: what someone writes who can write manifests too."""

    def do(folder: Path) -> None:
        path = folder / "m.onnx"
        model = onnx.load(path, load_external_data=False)
        edit(model)
        path.write_bytes(model.SerializeToString())
        replace(Manifest.load(manifest_path(path)), sha256=sha256(path)).save(manifest_path(path))

    return do


def place(key: str, value: str) -> Break:
    """The first tensor that lies beside the graph lies elsewhere."""

    def edit(model: onnx.ModelProto) -> None:
        tensor = next(t for t in model.graph.initializer if t.external_data)
        kept = {e.key: e.value for e in tensor.external_data} | {key: value}
        del tensor.external_data[:]
        for k, v in kept.items():
            tensor.external_data.add(key=k, value=v)

    return graph(edit)


def weights(folder: Path) -> None:
    """Other weights under hashes that fit."""
    data = folder / "m.onnx.data"
    data.write_bytes(bytes(b ^ 0x10 if i % 4 == 1 else b for i, b in enumerate(data.read_bytes())))
    path = manifest_path(folder / "m.onnx")
    replace(Manifest.load(path), data=DataFile(data.name, sha256(data))).save(path)
