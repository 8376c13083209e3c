"""Where in the user's model each ONNX node comes from: module path, file name and line, and nothing more.

Torch records whole stack traces, with absolute paths and lines of source; those are private and are stripped. The
exporter sees generated code, whose lines name nodes of the traced graph; that node knows the user's module and line.
What routing adds comes from modpass's own files, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
import torch
from torch import fx, nn

from modpass.exporters.islands import module_scopes

__all__ = ["MODULE", "SOURCE", "note_origins", "origin", "places_by_name"]

MODULE, SOURCE = "modpass.module", "modpass.source"
_TRACE = "pkg.torch.onnx.stack_trace"
_GENERATED = re.compile(r'File "(<eval_with_key>[^"]*)", line \d+, in \w+\n\s*(\w+) = ')
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in')
_LIBRARY = str(Path(torch.__file__).parent)


def note_origins(graph: ir.Model, model: nn.Module) -> None:
    """Note module path and ``file:line`` at each node that ``torch.onnx.export`` made from the traced ``model``."""
    graphs = {name: m for m in model.modules() if isinstance(m, fx.GraphModule) and (name := _code_name(m))}
    nodes = {file: {n.name: n for n in m.graph.nodes} for file, m in graphs.items()}
    for node in graph.graph.all_nodes():
        trace = node.metadata_props.get(_TRACE, "")
        found = _GENERATED.findall(trace)
        traced = next((nodes[f][n] for f, n in reversed(found) if n in nodes.get(f, {})), None)
        own = origin({"stack_trace": trace})
        own[MODULE] = next((s.removeprefix("model.") for s in reversed(module_scopes(node))), "")
        if traced is not None and traced.op == "call_module":  # what a routed block adds around the user's block
            own[MODULE] = str(traced.target)
        elif traced is not None:
            own = origin(traced.meta)
        node.metadata_props.update({k: v for k, v in own.items() if v})


def origin(meta: Mapping[str, object]) -> dict[str, str]:
    """Module path and ``file:line`` of a traced node, each empty where torch did not record it.

    >>> origin({"stack_trace": 'File "/home/me/mine.py", line 7, in forward'})
    {'modpass.module': '', 'modpass.source': 'mine.py:7'}
    """
    frames = _FRAME.findall(str(meta.get("stack_trace") or ""))
    own = [f for f in frames if not f[0].startswith((_LIBRARY, "<"))]
    stack = meta.get("nn_module_stack")
    path = str(list(stack.values())[-1][0]) if isinstance(stack, dict) and stack else ""
    module = re.sub(r"^L\['self'\]\.?", "", path)
    return {MODULE: module, SOURCE: f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""}


def places_by_name(graph: ir.Model) -> dict[str, str]:
    """Torch module and source line by every name that TensorRT may use for a node: its own, or its first output's.

    >>> node = ir.node("Relu", [], name="n", metadata_props={MODULE: "blocks.1.up", SOURCE: "mine.py:7"})
    >>> places_by_name(ir.Model(ir.Graph([], [], nodes=[node]), ir_version=10))["n"]
    "module 'blocks.1.up' (mine.py:7)"
    """
    found = {}
    for node in graph.graph.all_nodes():
        module = node.metadata_props.get(MODULE) or next(reversed(module_scopes(node)), None)
        line = node.metadata_props.get(SOURCE)
        place = f"module '{module}'" if module else "the model" if line else None
        if place is not None:
            place += f" ({line})" if line else ""
            found.update({n: place for n in (node.name, f"node_of_{node.outputs[0].name}") if n})
    return found


def _code_name(module: fx.GraphModule) -> str | None:
    """The file name under which the generated code of a graph was compiled."""
    code = getattr(type(module).forward, "__code__", None)
    return None if code is None else str(code.co_filename)
