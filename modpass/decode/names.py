"""Names for what decode adds to a graph, out of the way of those that the model gave."""

from __future__ import annotations

from torch import fx, nn

__all__ = ["free_placeholder", "free_stem"]


def free_placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """A placeholder called ``name``, with as many underscores behind as keep it apart from those that are there.

    >>> graph = fx.Graph(); free_placeholder(graph, "a.b").target, free_placeholder(graph, "a_b").target
    ('a_b', 'a_b_')
    """
    name = name.replace(".", "_")
    taken = {n.target for n in graph.nodes if n.op == "placeholder"}
    while name in taken:
        name += "_"
    return graph.placeholder(name)


def free_stem(module: nn.Module, stem: str) -> str:
    """``stem`` with as many underscores before it as no member of ``module`` begins with.

    >>> module = nn.Module(); module.table_0 = nn.Identity(); free_stem(module, "table")
    '_table'
    """
    members = [*module._parameters, *module._buffers, *module._modules]
    while any(name.startswith(f"{stem}_") for name in members):
        stem = f"_{stem}"
    return stem
