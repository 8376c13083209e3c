"""What a traced model knows of itself: inputs and outputs by name, free sizes by name, and how to build it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from modpass.blocks import Blocks
from modpass.calling import InputCheck
from modpass.model import Info, InputSpec, RoutedModel
from modpass.symbols import expr_of, hint_of, shape_of, value_of
from modpass.tracing import Traced

__all__ = ["describe"]


def describe(traced: Traced, found: Blocks, settings: dict[str, Any]) -> Info:
    """What a traced model says of itself, before its blocks are replaced."""
    placeholders = [n for n in traced.graph_module.graph.nodes if n.op == "placeholder"]
    examples = pytree.tree_leaves(list(traced.examples.values()))
    names = _size_names(placeholders, found)
    batch = next((e for e, n in names.items() if n == "batch"), None)
    sizes: list[Any] = [size for n in placeholders for size in getattr(value_of(n), "shape", ())]
    rows = next((hint_of(size) for size in sizes if batch is not None and expr_of(size) == batch), None)
    inputs = []
    for node, example in zip(placeholders, examples, strict=True):
        value = value_of(node)
        _same_batch(value, names, rows)
        if isinstance(value, Tensor):
            dims = tuple(
                int(e) if e.is_Integer else names.setdefault(e, f"{node.target}.{i}")
                for i, e in enumerate(shape_of(value))
            )
            inputs.append(InputSpec(str(node.target), dims, value.dtype, example))
            bounds = tuple(traced.ranges.get(e, (1, None)) for e in shape_of(value))
            if str(node.target) in traced.call.structure:
                traced.call.checks[str(node.target)] = InputCheck(dims, bounds)
    return Info(
        traced.call, traced.out_spec, tuple(inputs), _output_names(traced), settings, _source(traced), found.skipped
    )


def _size_names(placeholders: list[fx.Node], found: Blocks) -> dict[Any, str]:
    """Names of the free sizes: those of the first block's stream, or of the first input's first two dims."""
    sizes = next((b.analysis.sizes for b in found if b.reopened is None), None)
    if sizes is not None:
        return {sizes.sequence: "sequence", sizes.batch: "batch"}
    first = shape_of(value_of(placeholders[0]))[:2] if placeholders else ()
    return {e: name for e, name in zip(first, ("batch", "sequence"), strict=False) if e.is_Symbol}


def _same_batch(value: Any, names: dict[Any, str], rows: int | None) -> None:
    """Let an input whose batch merely broadcasts (a mask) share the batch's name, told by its example size."""
    batch = next((e for e, n in names.items() if n == "batch"), None)
    shape = shape_of(value)
    if batch is None or batch in shape or not isinstance(value, Tensor):
        return
    given: Any = value.shape
    hints = {e: hint_of(size) for e, size in zip(shape, given, strict=True) if e.is_Symbol}
    alike = [e for e in shape[:2] if e in hints and hints[e] == rows and e not in names]
    if alike:
        names[alike[0]] = "batch"


def _output_names(traced: Traced) -> tuple[str, ...]:
    """Names of the tensor outputs, in order; an output that is None has none."""
    output = next(n for n in traced.graph_module.graph.nodes if n.op == "output")
    leaves = pytree.tree_leaves(output.args, is_leaf=lambda a: a is None)
    spec = traced.out_spec
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    if isinstance(tree, Mapping):
        parts = [(str(k), pytree.tree_leaves(v)) for k, v in tree.items()]
        names = {i: name if len(part) == 1 else f"{name}.{n}" for name, part in parts for n, i in enumerate(part)}
    else:
        names = {i: "output" if spec.num_leaves == 1 else f"output.{i}" for i in range(spec.num_leaves)}
    taken = {str(n.target) for n in traced.graph_module.graph.nodes if n.op == "placeholder"}
    found = [names[i] for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node) and i in names]
    return tuple(f"{name}.out" if name in taken else name for name in found)


def _source(traced: Traced) -> dict[str, Any]:
    """How to build the dense model again: a Hugging Face class and configuration, where it has one."""
    if isinstance(traced.module, RoutedModel):
        return traced.module.info.source
    config = getattr(traced.module, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        return {"kind": "huggingface", "class": type(traced.module).__name__, "config": config.to_dict()}
    return {
        "kind": "module",
        "class": type(traced.module).__qualname__ if traced.module is not None else None,
    }
