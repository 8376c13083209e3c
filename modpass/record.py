"""Run a traced graph on values, without dropout, and keep what its nodes compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from modpass.mixing import name_of

__all__ = ["Recorder", "evaluated"]


class Recorder(fx.Interpreter):
    """Runs a graph and keeps the value of every node, or of those in ``keep``; no dropout is applied.

    ``replaced`` gives other values to attributes of the graph module, by their path.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        keep: set[fx.Node] | None = None,
        replaced: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(graph_module)
        self.keep, self.replaced = keep, replaced or {}
        self.values: dict[fx.Node, Any] = {}

    def record(self, *values: Any) -> dict[fx.Node, Any]:
        """Run on the values of the placeholders, in order; returns the kept values by node."""
        with torch.no_grad():
            self.run(*values, enable_io_processing=False)
        return self.values

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; of dropout only its input is left."""
        dropped = n.op == "call_function" and name_of(n) == "dropout"
        result = self.fetch_args_kwargs_from_env(n)[0][0] if dropped else super().run_node(n)
        if self.keep is None or n in self.keep:
            self.values[n] = result
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """An attribute, or what stands for it."""
        return self.replaced[target] if target in self.replaced else super().get_attr(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator; the trace may be one of training, whose attention drops."""
        if target is torch.ops.aten.scaled_dot_product_attention.default:
            names = [a.name for a in target._schema.arguments]
            args, kwargs = (), {**dict(zip(names, args, strict=False)), **kwargs, "dropout_p": 0.0}
        return super().call_function(target, args, kwargs)


@contextmanager
def evaluated(module: nn.Module) -> Iterator[None]:
    """Inside, the module and its parts are in eval mode.

    >>> drop = nn.Dropout()
    >>> with evaluated(drop): drop.training
    False
    >>> drop.training
    True
    """
    before = {m: m.training for m in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, flag in before.items():
            part.training = flag
