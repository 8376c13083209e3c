"""The rewritten trace -> a ``RoutedModel`` with every parameter under every name that the original has for it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from modpass.dropout import switch_dropout
from modpass.model import Info, RoutedModel
from modpass.rewrite import drop_inputs
from modpass.tracing import Traced

__all__ = ["finish", "parameters_of"]


def parameters_of(traced: Traced) -> dict[str, Tensor]:
    """Parameters and persistent buffers by every name they have, tied ones too."""
    source = traced.module if traced.module is not None else traced.graph_module
    return source.state_dict(keep_vars=True)


def finish(traced: Traced, info: Info, keep: Mapping[str, Tensor]) -> RoutedModel:
    """The graph as a model in the original's mode; ``keep``: ``parameters_of`` before anything was replaced."""
    graph_module = traced.graph_module
    drop_inputs(graph_module.graph, set(traced.call.constants))
    switch_dropout(graph_module)
    graph_module.graph.lint()
    result = RoutedModel(graph_module, graph_module.graph, info)
    for path, holder in result.named_modules():
        prefix = f"{path}." if path else ""
        holder._non_persistent_buffers_set |= {n for n in holder._buffers if prefix + n not in keep}
    for name, value in keep.items():
        _keep(result, name, value)
    return result.train(traced.module.training if traced.module is not None else False)


def _keep(module: nn.Module, path: str, value: Tensor) -> None:
    """Register a parameter that the graph itself does not read, such as the second name of a tied weight."""
    *parents, leaf = path.split(".")
    for part in parents:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    if isinstance(value, nn.Parameter):
        module._parameters[leaf] = value
        module._buffers.pop(leaf, None)
    elif leaf not in module._parameters:
        module._buffers[leaf] = value
