"""Is a graph what its manifest says, dim by dim? Read from the graph itself, without running it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import onnx

from modpass.errors import VerificationError
from modpass.exporters.manifest import Manifest, RoutedSpec, TensorSpec

__all__ = ["check_structure"]

_ROUTER = "modpass.router.Router"


def check_structure(path: str | os.PathLike[str], model: onnx.ModelProto, manifest: Manifest) -> None:
    """Compare opset, inputs, outputs and routed blocks of the graph at ``path`` with its manifest.

    Raises:
        VerificationError: they differ; says where.
    """
    graph = model.graph
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    if opset != manifest.opset:
        raise _differs(path, "the opset", opset, manifest.opset)
    weights = {t.name for t in graph.initializer}
    _same_ports(path, "inputs", [v for v in graph.input if v.name not in weights], manifest.inputs)
    _same_ports(path, "outputs", graph.output, manifest.outputs)
    shapes = {v.name: _spec(v) for v in (*graph.value_info, *graph.output)}
    made = weights | {name for node in graph.node for name in node.output}
    for block, routed in manifest.routed_blocks.items():
        _check_block(path, block, routed, shapes, made)
    unknown = sorted(_routers(graph.node) - manifest.routed_blocks.keys())
    if unknown:
        raise VerificationError(
            f"'{path}' has a router in block '{unknown[0]}', which its manifest does not name; export it again"
        )


def _check_block(
    path: str | os.PathLike[str], block: str, routed: RoutedSpec, shapes: Mapping[str, TensorSpec], made: set[str]
) -> None:
    if not 1 <= routed.k <= routed.sequence:
        raise VerificationError(
            f"the manifest of '{path}' has k = {routed.k} of {routed.sequence} tokens in block '{block}'; "
            f"allowed are 1 to {routed.sequence}; export it again"
        )
    if routed.indices is None:
        return
    if routed.indices not in made:
        raise VerificationError(
            f"'{path}' makes no value '{routed.indices}', the choices of block '{block}' in its manifest; "
            f"export it again"
        )
    found = shapes.get(routed.indices)
    if found is not None and (found.dtype != "int64" or found.shape[-1:] != (routed.k,)):
        raise _differs(
            path, f"the choices of block '{block}'", f"{found.dtype} {list(found.shape)}", f"int64 [.., {routed.k}]"
        )


def _routers(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """The blocks whose routers the exporter recorded, in names of the model that was exported."""
    found: set[str] = set()
    for node in nodes:
        for entry in node.metadata_props:
            if entry.key != "namespace" or _ROUTER not in entry.value:
                continue
            scopes = [part.partition(": ") for part in entry.value.split("/")]
            names = [name for name, _, kind in scopes if kind == _ROUTER]
            found.update(n.removeprefix("model.").removesuffix(".router") for n in names)
    return found


def _same_ports(
    path: str | os.PathLike[str], what: str, values: Iterable[onnx.ValueInfoProto], wanted: tuple[TensorSpec, ...]
) -> None:
    found = tuple(map(_spec, values))
    if [s.name for s in found] != [s.name for s in wanted]:
        raise _differs(path, f"its {what}", [s.name for s in found], [s.name for s in wanted])
    for own, said in zip(found, wanted, strict=True):
        if own != said:
            raise _differs(path, f"'{own.name}'", f"{own.dtype} {list(own.shape)}", f"{said.dtype} {list(said.shape)}")


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    dims = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim)
    kind = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    return TensorSpec(value.name, dims, "float32" if kind == "float" else kind)


def _differs(path: str | os.PathLike[str], what: str, found: object, said: object) -> VerificationError:
    return VerificationError(
        f"'{path}' is not what its manifest says: {what} is {found}, the manifest has {said}; export it again"
    )
