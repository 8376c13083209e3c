"""The per-token reference of routed branches: the dense trace, in which each branch's end is written token by token.

The pass decides where a branch lies; what becomes of it there (the copied body, the gathers, the write back) is what
this checks, and it shares none of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils import _pytree as pytree

from modpass.blocks import Blocks
from modpass.mixing import name_of
from modpass.record import Recorder
from modpass.reference import Routing, Setting
from modpass.tracing import Traced

__all__ = ["DenseBranches", "copy_dense"]


@dataclass(frozen=True)
class DenseBranches:
    """A dense trace, and the nodes of it between which each branch lies."""

    graph_module: fx.GraphModule
    ends: Mapping[str, tuple[fx.Node, fx.Node]]
    examples: Mapping[str, Any]

    def run(self, settings: Mapping[str, Setting], inputs: Mapping[str, Any]) -> Any:
        """The model's flat outputs with these branches routed."""
        routings = {n: Routing(setting, None, _nothing) for n, setting in settings.items()}
        runner = _Runner(self.graph_module, [(*self.ends[n], routing) for n, routing in routings.items()])
        values = pytree.tree_leaves([inputs.get(name, value) for name, value in self.examples.items()])
        with torch.no_grad():
            return runner.run(*values, enable_io_processing=False)


def copy_dense(traced: Traced, blocks: Blocks) -> DenseBranches:
    """Keep the dense graph of a trace that is about to be routed; parameters are shared."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(traced.graph_module.graph, copies))
    ends = {b.name: (copies[b.ends[0]], copies[b.ends[1]]) for b in blocks}
    return DenseBranches(fx.GraphModule(traced.graph_module, graph), ends, traced.examples)


class _Runner(Recorder):
    def __init__(self, graph_module: fx.GraphModule, branches: list[tuple[fx.Node, fx.Node, Routing]]) -> None:
        super().__init__(graph_module, set())
        self.garbage_collect_values = False
        self.branches, self.open = branches, ExitStack()

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; what lies between the ends of a branch sees the chosen tokens alone."""
        self.node = n
        value = super().run_node(n)
        for _, _, routing in (b for b in self.branches if b[1] is n):
            self.open.close()
            value = routing.write(value)
        for _, _, routing in (b for b in self.branches if b[0] is n):
            self.open.enter_context(routing.start([value]))
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator; attention by the names under which tokens are hidden from it."""
        name = name_of(self.node)
        if name == "scaled_dot_product_attention":
            given = dict(zip((a.name for a in target._schema.arguments), args, strict=False)) | kwargs
            return F.scaled_dot_product_attention(**{**given, "dropout_p": 0.0})
        if name in ("softmax", "matmul", "bmm", "topk", "logsumexp"):
            return getattr(torch, name)(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def _nothing(positions: list[list[int]]) -> None:
    """Take no note."""
