"""What decode is compared with: a cache that is concatenated in the graph, and Hugging Face's own cached decode."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from modpass.exporters.backend import OnnxRuntimeBackend
from modpass.exporters.decoder_manifest import DecoderManifest

__all__ = ["ConcatenatedCache", "hugging_face"]


class ConcatenatedCache:
    """The same dense step with caches that go in whole and come out whole, one token longer and one shorter.

    This is what an exported decode does whose graph ends in ``present = Concat(past, new)``.
    """

    def __init__(self, folder: Path, target: Path, threads: int | None = None) -> None:
        manifest = DecoderManifest.load(folder)
        shutil.copytree(folder, target)
        graph = ir.load(target / "decode.onnx")
        for cache in manifest.caches:
            _concatenate(graph, cache.name, cache.dim)
        ir.save(graph, target / "decode.onnx")
        self.manifest, self.backend = manifest, OnnxRuntimeBackend(threads)
        self.backend.open(target, manifest)

    def step(self, token: int, position: int) -> np.ndarray:
        """One token; the whole caches that come out are the next step's input."""
        logits = self.backend.compute(np.array([token]), np.array([position]), np.array([True]))
        self.backend.swap({c.name: f"{c.name}.present" for c in self.manifest.caches})
        return logits


def _concatenate(graph: ir.Model, name: str, dim: int) -> None:
    """Add an output ``present``: the cache without its first slot, and the new row."""
    past = next(v for v in graph.graph.inputs if v.name == name)
    new = next(v for v in graph.graph.outputs if v.name == f"{name}.new")
    ends = [_constant(graph, f"{name}.{k}", v) for k, v in (("from", [1]), ("to", [2**31]), ("axis", [dim]))]
    rest = ir.node("Slice", [past, *ends])
    present = ir.node("Concat", [rest.outputs[0], new], {"axis": dim})
    graph.graph.extend([rest, present])
    value = present.outputs[0]
    value.name, value.shape, value.type = f"{name}.present", past.shape, past.type
    graph.graph.outputs.append(value)


def _constant(graph: ir.Model, name: str, numbers: list[int]) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(np.array(numbers, np.int64), name=name))
    value.shape, value.type = ir.Shape([len(numbers)]), ir.TensorType(ir.DataType.INT64)
    graph.graph.register_initializer(value)
    return value


def hugging_face(model: nn.Module, ids: list[int]) -> Callable[[list[int]], None] | None:
    """A function that steps through tokens with transformers' own cache after ``ids``; None for other models."""
    if not hasattr(model, "generate"):
        return None
    runs: Any = model
    with torch.no_grad():
        cache = runs(input_ids=torch.tensor([ids]), use_cache=True).past_key_values

    def steps(tokens: list[int]) -> None:
        with torch.no_grad():
            for token in tokens:
                runs(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        cache.crop(-len(tokens))

    return steps
