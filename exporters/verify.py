"""Does the exported file compute what the model computes?"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import modpass
from modpass.errors import ExportError, VerificationError
from modpass.exporters.manifest import Manifest, manifest_path
from modpass.exporters.onnx_session import open_session
from modpass.exporters.shapes import FixedShape, example_tensors
from modpass.model import RoutedModel
from modpass.routing import recorded_choices

__all__ = ["BOUNDS", "Difference", "VerificationReport", "verify"]

Array = np.ndarray[Any, Any]

# Largest relative difference of an output, and least share of equal choices.
BOUNDS = {"float32": (1e-4, 1.0), "float16": (5e-2, 0.9), "bfloat16": (2e-1, 0.8)}


@dataclass(frozen=True)
class Difference:
    """How far one output of the file is from the model's: largest absolute difference, and that over the model's
    largest absolute value.
    """

    name: str
    max_abs: float
    max_rel: float


@dataclass(frozen=True)
class VerificationReport:
    """Differences per output, and per routed block the share of equal token choices."""

    outputs: tuple[Difference, ...]
    choices: Mapping[str, float]
    dtype: str = "float32"

    def check(self, max_error: float | None = None, min_agreement: float | None = None) -> VerificationReport:
        """Return the report if it is within bounds, by default those of the file's dtype (``BOUNDS``).

        Raises:
            VerificationError: an output or a block's choices are further off than allowed.

        >>> VerificationReport((Difference("logits", 1e-6, 1e-7),), {}).check().choices
        {}
        """
        own_error, own_agreement = BOUNDS[self.dtype]
        max_error = own_error if max_error is None else max_error
        min_agreement = own_agreement if min_agreement is None else min_agreement
        for d in self.outputs:
            if not d.max_rel <= max_error:  # NaN is never within bounds
                raise VerificationError(
                    f"output '{d.name}' is off by {d.max_rel:.3g} relative ({d.max_abs:.3g} absolute); "
                    f"allowed is {max_error:g} (check(max_error=...))"
                )
        for block, share in self.choices.items():
            if share < min_agreement:
                raise VerificationError(
                    f"block '{block}' chooses {share:.2%} of the model's tokens; allowed is {min_agreement:.2%} or more"
                )
        return self

    def __str__(self) -> str:
        lines = [f"{d.name}: max abs {d.max_abs:.3g}, max rel {d.max_rel:.3g}" for d in self.outputs]
        if self.choices:
            lines.append(
                f"token choices equal: {min(self.choices.values()):.2%} or more in each of "
                f"{len(self.choices)} routed blocks"
            )
        return "\n".join(lines)


def verify(
    model: RoutedModel | nn.Module, path: str | os.PathLike[str], inputs: Mapping[str, Tensor] | None = None
) -> VerificationReport:
    """Run the file in ONNX Runtime beside the model in PyTorch, on the same inputs; note the figures in the manifest.

    Args:
        model: the model that was exported.
        path: the ONNX file; its manifest is checked first.
        inputs: by name; drawn at random where left out.

    Raises:
        VerificationError: the file is not the one its manifest describes, or ONNX Runtime cannot run it.
        StateError: there is no manifest.
    """
    manifest = Manifest.load(manifest_path(path))
    manifest.check(path)
    routed = model if isinstance(model, RoutedModel) else modpass.trace(model)
    shape = FixedShape(manifest.shape["batch"], manifest.shape["sequence"], manifest.shape["dims"])
    given = dict(inputs) if inputs is not None else example_tensors(routed, shape)
    wanted, wanted_choices = _in_torch(routed, given)
    names = {n: b.indices for n, b in manifest.routed_blocks.items() if b.indices is not None}
    found = _in_onnxruntime(path, given, list(names.values()))
    outputs = tuple(_difference(n, wanted[n], found[n]) for n in wanted)
    choices = {n: _agreement(wanted_choices[n].numpy(), found[value]) for n, value in names.items()}
    report = VerificationReport(outputs, choices, manifest.dtype)
    replace(
        manifest,
        parity={"outputs": [asdict(d) for d in outputs if np.isfinite(d.max_rel)], "choices": choices},
    ).save(manifest_path(path))
    return report


def _in_torch(model: RoutedModel, given: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), recorded_choices() as choices:
            leaves = [v for v in pytree.tree_leaves(model(**given)) if isinstance(v, Tensor)]
    finally:
        model.train(training)
    return dict(zip(model.output_names, leaves, strict=True)), choices


def _in_onnxruntime(path: str | os.PathLike[str], given: Mapping[str, Tensor], extra: list[str]) -> dict[str, Array]:
    """Run the file with the values in ``extra`` as outputs too, from a temporary copy that reads the same weights."""
    graph = ir.load(path)
    values = {v.name: v for node in graph.graph for v in node.outputs}
    graph.graph.outputs.extend(values[n] for n in extra)
    temporary = Path(path).parent / f".{Path(path).name}.{os.getpid()}.verify"
    try:
        ir.save(graph, temporary)
        run = open_session(temporary)
    except ExportError as e:
        raise VerificationError(str(e)) from e
    finally:
        temporary.unlink(missing_ok=True)
    types = {i.name: i.type for i in run.get_inputs()}
    feed = {n: _array(given[n], types[n]) for n in types}
    names = [o.name for o in run.get_outputs()]
    try:
        return dict(zip(names, run.run(names, feed), strict=True))
    except Exception as e:
        raise VerificationError(f"ONNX Runtime cannot run '{path}': {e}") from e


def _array(tensor: Tensor, kind: str) -> Array:
    if kind == "tensor(float16)":
        return tensor.half().numpy()
    return tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _difference(name: str, wanted: Tensor, found: Array) -> Difference:
    reference = wanted.double().numpy()
    gap = float(np.abs(reference - found.astype(np.float64)).max()) if reference.size else 0.0
    scale = float(np.abs(reference).max()) if reference.size else 1.0
    return Difference(name, gap, gap / scale if scale else gap)


def _agreement(wanted: Array, found: Array) -> float:
    """The share of chosen tokens that both chose, row by row; a free slot of causal selection equals another."""
    rows = zip(wanted.tolist(), found.tolist(), strict=True)
    return sum((Counter(a) & Counter(b)).total() for a, b in rows) / wanted.size
