"""A node keeps where it comes from: module, file name and line, and nothing more of the user's machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import modpass
from modpass.errors import BuildError
from modpass.exporters import FixedShape, build_engine, export_onnx, tensorrt
from tests.broken_exports import encoder

HERE = Path(__file__)


class Large(nn.Module):
    """Takes more of a sequence than TensorRT's TopK can."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.topk(self.scale(x).squeeze(-1), 4000, dim=1).values  # the line that fails


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Large()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def origins_of(path: Path) -> Iterator[tuple[str, str | None, str | None]]:
    for node in onnx.load(path).graph.node:
        found = {e.key: e.value for e in node.metadata_props}
        yield node.op_type, found.get("modpass.module"), found.get("modpass.source")


def line_of(file: Path, text: str) -> str:
    lines = file.read_text().splitlines()
    return f"{file.name}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


def test_nodes_know_module_and_line_also_inside_a_routed_block(tmp_path: Path) -> None:
    export_onnx(encoder(), tmp_path / "m.onnx", FixedShape(1, 8))
    found = set(origins_of(tmp_path / "m.onnx"))
    line = line_of(HERE.parent / "broken_exports.py", "torch.relu(self.up(")
    embed = line_of(HERE.parent / "broken_exports.py", "self.embed(ids)")
    assert ("Gather", "embed", embed) in found
    for block in ("blocks.0", "blocks.1"):
        assert ("MatMul", f"{block}.up", line) in found
        assert ("LayerNormalization", f"{block}.norm", line) in found
    topk = {(module, source.partition(":")[0]) for kind, module, source in found if kind == "TopK" and source}
    assert topk == {("blocks.1", "routing.py")}


def test_no_path_of_the_machine_and_no_source_is_in_the_file(tmp_path: Path) -> None:
    export_onnx(encoder(), tmp_path / "m.onnx", FixedShape(1, 8))
    content = (tmp_path / "m.onnx").read_bytes()
    assert b"broken_exports.py:" in content
    for private in (str(HERE.parent.parent), str(Path.home()), "site-packages", 'File "', "torch.relu(self", "<eval_"):
        assert private.encode() not in content


def test_a_layer_that_fails_names_module_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorrt_rtx", reason="pip install 'modpass[tensorrt-rtx]'")
    monkeypatch.setattr(tensorrt, "preflight", lambda *_: [])
    model = modpass.trace(Wrapped().eval(), (torch.randn(2, 4100, 1),))
    export_onnx(model, tmp_path / "m.onnx", FixedShape(1, 5000))
    with pytest.raises(BuildError) as caught:
        build_engine(tmp_path / "m.onnx", tmp_path / "e", progress=False)
    place = f"of module 'inner' ({line_of(HERE, '# the line that fails')})"
    assert place in str(caught.value)
    assert "K exceeds the maximum" in str(caught.value)
