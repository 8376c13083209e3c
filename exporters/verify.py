"""Does the exported file compute what the model computes?"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import modpass
from modpass.errors import ExportError, VerificationError
from modpass.exporters.draws import drawn, draws
from modpass.exporters.manifest import DataFile, Manifest, manifest_path
from modpass.exporters.onnx_session import open_session
from modpass.exporters.probe import Probe, probe_path, sampled, scale_of
from modpass.exporters.shapes import FixedShape
from modpass.files import sha256
from modpass.model import RoutedModel
from modpass.record import evaluated
from modpass.routing import recorded_choices

__all__ = ["BOUNDS", "Difference", "VerificationReport", "compare", "difference", "recorded", "run_probe", "verify"]

_SEED = 0

Array = np.ndarray[Any, Any]

# Largest relative difference of an output, and least share of equal choices.
BOUNDS = {"float32": (1e-4, 1.0), "float16": (5e-2, 0.9), "bfloat16": (2e-1, 0.8),
          "int8": (0.1, 0.8), "fp8": (0.2, 0.7), "int4": (0.4, 0.5)}  # fmt: skip


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
    """Differences per output, and per routed block the share of equal token choices.

    dtype: what the file computes with. max_error: what its export allowed, in place of the bounds of the dtype.
    """

    outputs: tuple[Difference, ...]
    choices: Mapping[str, float]
    dtype: str = "float32"
    max_error: float | None = None

    def check(self, max_error: float | None = None, min_agreement: float | None = None) -> VerificationReport:
        """Return the report if it is within bounds, by default those of the file's dtype (``BOUNDS``).

        Raises:
            VerificationError: an output or a block's choices are further off than allowed.

        >>> VerificationReport((Difference("logits", 1e-6, 1e-7),), {}).check().choices
        {}
        """
        own_error, own_agreement = BOUNDS[self.dtype] if self.max_error is None else (self.max_error, 0.0)
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

    Where the inputs are drawn here, some of what the model computed is kept beside the file (its *probe*), so that
    ``modpass verify`` can run the file against it later without the model.

    Args:
        model: the model that was exported.
        path: the ONNX file; its manifest is checked first.
        inputs: by name; drawn at random where left out.

    Raises:
        VerificationError: the file is not the one its manifest describes, or ONNX Runtime cannot run it.
        StateError: there is no manifest.

    >>> import tempfile
    >>> from modpass.decode.example import tiny_decoder
    >>> from modpass.exporters import FixedShape, export_onnx
    >>> model, path = tiny_decoder(True), tempfile.mkdtemp() + "/m.onnx"
    >>> written = export_onnx(model, path, FixedShape(1, 8)); verify(model, path).choices
    {'blocks.1': 1.0}
    """
    manifest = Manifest.load(manifest_path(path))
    manifest.check(path)
    report, probe = compare(model, path, manifest, inputs)
    part = manifest.probe
    if probe is not None:
        kept = probe_path(Path(path))
        probe.save(kept)
        part = DataFile(kept.name, sha256(kept))
    outputs = [asdict(d) for d in report.outputs if np.isfinite(d.max_rel)]
    parity = {"outputs": outputs, "choices": dict(report.choices)}
    replace(manifest, parity=parity, probe=part).save(manifest_path(path))
    return report


def recorded(manifest: Manifest) -> VerificationReport | None:
    """What ``verify`` noted in a manifest, if it ran.

    >>> print(recorded(Manifest("onnx", "m.onnx", "00", 18, "float32")))
    None
    """
    if manifest.parity is None:
        return None
    outputs = tuple(Difference(**d) for d in manifest.parity["outputs"])
    return VerificationReport(outputs, manifest.parity["choices"], manifest.precision, manifest.max_error)


def compare(
    model: RoutedModel | nn.Module,
    path: str | os.PathLike[str],
    manifest: Manifest,
    inputs: Mapping[str, Tensor] | None = None,
) -> tuple[VerificationReport, Probe | None]:
    """What ``verify`` finds, and the probe where inputs were drawn; writes nothing.

    Raises:
        VerificationError: ONNX Runtime cannot run the file.
    """
    routed = model if isinstance(model, RoutedModel) else modpass.trace(model)
    shape = FixedShape(manifest.shape["batch"], manifest.shape["sequence"], manifest.shape["dims"])
    how = draws(routed, shape)
    given = dict(inputs) if inputs is not None else {n: torch.from_numpy(a) for n, a in drawn(how, _SEED).items()}
    types = {s.name: s.dtype for s in routed.inputs}
    wanted, chosen = _in_torch(routed, {n: t.to(types.get(n, t.dtype)) for n, t in given.items()})
    names = {n: b.indices for n, b in manifest.routed_blocks.items() if b.indices is not None}
    if other := sorted(names.keys() - chosen.keys()):
        raise VerificationError(
            f"'{path}' routes block '{other[0]}', the model does not; give the model as it was exported"
        )
    found = _in_onnxruntime(path, given, list(names.values()))
    arrays = {n: _plain(t) for n, t in wanted.items()}
    _same_shapes(path, {n: a.shape for n, a in arrays.items()}, found)
    outputs = tuple(difference(n, a, found[n], scale_of(a)) for n, a in arrays.items())
    choices = {n: _agreement(chosen[n].numpy(), found[value]) for n, value in names.items()}
    report = VerificationReport(outputs, choices, manifest.precision, manifest.max_error)
    if inputs is not None:
        return report, None
    shapes = {n: tuple(a.shape) for n, a in arrays.items()}
    kept = {n: sampled(a) for n, a in arrays.items()}
    scales = {n: scale_of(a) for n, a in arrays.items()}
    return report, Probe(_SEED, how, shapes, kept, scales, {n: chosen[n].numpy() for n in names})


def run_probe(path: str | os.PathLike[str], manifest: Manifest) -> VerificationReport:
    """Run the file against what the model computed when it was exported; ``manifest`` must have a probe.

    Raises:
        VerificationError: ONNX Runtime cannot run the file, or an output is of another shape.
        StateError: the probe cannot be read.
    """
    assert manifest.probe is not None
    probe = Probe.load(Path(path).parent / manifest.probe.file)  # that which was hashed, whatever the graph is called
    names = {n: b.indices for n, b in manifest.routed_blocks.items() if b.indices is not None}
    given = {n: torch.from_numpy(a) for n, a in drawn(probe.inputs, probe.seed).items()}
    found = _in_onnxruntime(path, given, list(names.values()))
    _same_shapes(path, probe.shapes, found)
    outputs = tuple(difference(n, a, sampled(found[n]), probe.scales[n]) for n, a in probe.outputs.items())
    choices = {n: _agreement(a, found[names[n]]) for n, a in probe.choices.items() if n in names}
    return VerificationReport(outputs, choices, manifest.precision, manifest.max_error)


def _same_shapes(
    path: str | os.PathLike[str], wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, Array]
) -> None:
    for name, shape in wanted.items():
        if name not in found or found[name].shape != shape:
            own = list(found[name].shape) if name in found else "missing"
            raise VerificationError(f"output '{name}' of '{path}' is {own}, the model's is {list(shape)}")


def _in_torch(model: RoutedModel, given: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    try:
        with evaluated(model), torch.no_grad(), recorded_choices() as choices:
            leaves = [v for v in pytree.tree_leaves(model(**given)) if isinstance(v, Tensor)]
    except (IndexError, RuntimeError) as e:
        sizes = ", ".join(f"{n} {list(t.shape)}" for n, t in given.items())
        reason = next(iter(str(e).splitlines()), type(e).__name__)
        raise VerificationError(f"the model itself fails in PyTorch at {sizes}, so the file is no use: {reason}") from e
    return dict(zip(model.output_names, leaves, strict=True)), choices


def _in_onnxruntime(path: str | os.PathLike[str], given: Mapping[str, Tensor], extra: list[str]) -> dict[str, Array]:
    """Run the file with the values in ``extra`` as outputs too; nothing is written."""
    try:
        run = open_session(path, outputs=extra)
    except ExportError as e:
        raise VerificationError(str(e)) from e
    types = {i.name: i.type for i in run.get_inputs()}
    missing = [n for n in types if n not in given]
    if missing:
        raise VerificationError(f"'{path}' takes '{missing[0]}', which the model does not; export it again")
    feed = {n: _array(given[n], types[n]) for n in types}
    names = [o.name for o in run.get_outputs()]
    try:
        return dict(zip(names, run.run(names, feed), strict=True))
    except Exception as e:
        raise VerificationError(f"ONNX Runtime cannot run '{path}': {e}") from e


def _array(tensor: Tensor, kind: str) -> Array:
    if kind == "tensor(float16)":
        return tensor.half().numpy()
    if kind in _NARROW:
        return tensor.to(_NARROW[kind]).numpy()
    return tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


_NARROW = {"tensor(int32)": torch.int32, "tensor(int8)": torch.int8, "tensor(uint8)": torch.uint8}


def _plain(tensor: Tensor) -> Array:
    """A tensor in numpy, which has no bfloat16."""
    array: Array = tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
    return array


def difference(name: str, wanted: Array, found: Array, scale: float) -> Difference:
    """How far ``found`` is from ``wanted``, absolutely and over ``scale``.

    >>> difference("y", np.array([1.0, 2.0]), np.array([1.0, 2.5]), 2.0)
    Difference(name='y', max_abs=0.5, max_rel=0.25)
    """
    gap = float(np.abs(wanted.astype(np.float64) - found.astype(np.float64)).max()) if wanted.size else 0.0
    return Difference(name, gap, gap / scale if scale else gap)


def _agreement(wanted: Array, found: Array) -> float:
    """The share of chosen tokens that both chose, row by row; a free slot of causal selection equals another."""
    rows = zip(wanted.tolist(), found.tolist(), strict=True)
    return sum((Counter(a) & Counter(b)).total() for a, b in rows) / wanted.size
