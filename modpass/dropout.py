"""Dropout in a graph, whose flag the trace froze: as modules that follow ``train()`` and ``eval()``, or taken out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from modpass.mixing import name_of

__all__ = ["AttentionDropout", "copy_graph", "switch_dropout", "undo_dropout"]


class AttentionDropout(nn.Module):
    """Scaled dot-product attention with a dropout rate that holds in training mode alone."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Attention of ``query`` ``[B, H, Q, D]`` over ``key`` and ``value`` ``[B, H, K, D]``."""
        rate = self.rate if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, dropout_p=rate, **options)


def copy_graph(graph_module: fx.GraphModule) -> fx.Graph:
    """A copy of a module's graph whose nodes may be changed; it refers to the same submodules."""
    graph = fx.Graph(owning_module=graph_module)
    graph.output(graph.graph_copy(graph_module.graph, {}))
    return graph


def switch_dropout(graph_module: fx.GraphModule) -> None:
    """Turn dropout operators, whose flag the trace froze, into modules that follow ``train()`` and ``eval()``."""
    makers: dict[str, Callable[[fx.Node], tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None]] = {
        "dropout": lambda n: (nn.Dropout(float(n.args[1])), (n.args[0],), {}),  # type: ignore[arg-type]
        "scaled_dot_product_attention": _attention_module,
    }
    count = 0
    for node in list(graph_module.graph.nodes):
        made = makers[name_of(node)](node) if node.op == "call_function" and name_of(node) in makers else None
        if made is None:
            continue
        module, args, kwargs = made
        name, count = f"_dropout_{count}", count + 1
        graph_module.add_module(name, module.train(graph_module.training))
        with graph_module.graph.inserting_before(node):
            call = graph_module.graph.call_module(name, args, kwargs)
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        graph_module.graph.erase_node(node)


def _attention_module(node: fx.Node) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None:
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    rate = given.pop("dropout_p", 0.0)
    tensors = tuple(given.pop(n) for n in ("query", "key", "value"))
    return (AttentionDropout(float(rate)), tensors, given) if rate else None


def undo_dropout(graph_module: fx.GraphModule) -> fx.Graph:
    """A copy of a module's graph as it is in eval mode, with plain operators where dropout modules were."""
    graph = copy_graph(graph_module)
    for node in list(graph.nodes):
        module = graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, nn.Dropout):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif isinstance(module, AttentionDropout):
            with graph.inserting_before(node):
                plain = graph.call_function(torch.ops.aten.scaled_dot_product_attention.default, node.args, node.kwargs)
            plain.meta = dict(node.meta)
            node.replace_all_uses_with(plain)
            graph.erase_node(node)
    return graph
