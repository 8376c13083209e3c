"""Any model -> a graph of ATen ops that is parametric in batch and sequence."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from modpass.calling import Call, parameter_names
from modpass.errors import InputError, TraceError
from modpass.inputs import as_named, widen
from modpass.normalise import normalise
from modpass.program import export_program, mutates, without_writes

__all__ = ["Traced", "capture"]


@dataclass
class Traced:
    """A traced model: its graph, how it is called, and (if there was one) the module it came from."""

    graph_module: fx.GraphModule
    call: Call
    out_spec: pytree.TreeSpec
    examples: dict[str, Any]
    module: nn.Module | None
    ranges: dict[Any, tuple[int, int | None]] = field(default_factory=dict)


def capture(model: nn.Module | ExportedProgram, example_inputs: Any = None) -> Traced:
    """Trace ``model``; the model itself is left as it was.

    Raises:
        TraceError: ``torch.export`` cannot trace it.
        InputError: no example inputs were given and the model does not say what it takes.

    >>> traced = capture(nn.Linear(3, 3), (torch.randn(2, 3),))
    >>> [n.target for n in traced.graph_module.graph.nodes if n.op == "placeholder"]
    ['input']
    """
    if isinstance(model, ExportedProgram):
        return _from_program(model)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"a {type(model).__name__} cannot be transformed; give an nn.Module, an ExportedProgram "
            "or an fx.GraphModule"
        )
    named = widen(as_named(model, example_inputs))
    program = export_program(_Stepwise(model) if isinstance(model, fx.GraphModule) else model, (), named)
    call = _call(model, named)
    if program.call_spec.out_spec is None:
        raise TraceError(f"torch.export recorded no output structure for {type(model).__name__}")
    graph_module = program.module(check_guards=False)
    normalise(graph_module.graph)
    _name_inputs(graph_module.graph, call)
    return Traced(graph_module, call, program.call_spec.out_spec, named, model, _ranges(program))


def _name_inputs(graph: fx.Graph, call: Call) -> None:
    """Give the inputs back the names by which the model takes them, which the trace writes in small letters."""
    own = {name.lower(): name for name, spec in call.structure.items() if spec.is_leaf()}
    for node in graph.nodes:
        if node.op == "placeholder":
            node.target = own.get(str(node.target), node.target)


class _Stepwise(nn.Module):
    """Runs a traced graph node by node, so that the module paths it recorded survive another trace."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__()
        for slot in ("_parameters", "_buffers", "_modules"):
            object.__setattr__(self, slot, dict(getattr(graph_module, slot)))
        self._non_persistent_buffers_set = set(graph_module._non_persistent_buffers_set)
        signature = inspect.signature(graph_module.forward)

        def forward(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            with preserve_node_meta():
                return fx.Interpreter(graph_module).run(*bound.arguments.values())

        forward.__signature__ = signature  # type: ignore[attr-defined]
        object.__setattr__(self, "forward", forward)


def _ranges(program: ExportedProgram) -> dict[Any, tuple[int, int | None]]:
    """The sizes for which the trace holds. A size of one is let through: torch.export sets that aside by default."""
    found: dict[Any, tuple[int, int | None]] = {}
    for symbol, bounds in program.range_constraints.items():
        low = int(bounds.lower) if bounds.lower.is_Integer else 1
        high = int(bounds.upper) if bounds.upper.is_Integer and bounds.upper < 2**31 else None
        found[symbol] = (low if low > 2 else 1, high)
    return found


def _call(model: nn.Module, named: dict[str, Any]) -> Call:
    structure = {name: pytree.tree_structure(value) for name, value in named.items()}
    constants = {
        name: v for name, v in named.items() if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(v))
    }
    parameters = inspect.signature(model.forward).parameters
    defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
    return Call(parameter_names(model.forward), structure, constants, _optional(named, defaults), defaults)


def _optional(named: dict[str, Any], defaults: dict[str, Any]) -> dict[str, tuple[str, torch.dtype]]:
    """Masks that the original lets a caller leave out: all ones in the example, shaped like tokens."""
    found = {}
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.dim() != 2 or defaults.get(name, 0) is not None:
            continue
        main = next(
            (n for n, v in named.items() if n != name and isinstance(v, Tensor) and v.shape[:2] == value.shape),
            None,
        )
        if main is not None and "mask" in name and bool((value == 1).all()):
            found[name] = (main, value.dtype)
    return found


def _from_program(program: ExportedProgram) -> Traced:
    spec = program.call_spec
    if spec.in_spec is None or spec.out_spec is None:
        raise TraceError("the ExportedProgram does not record its call; export it again with this torch")
    if any(mutates(n) for n in program.graph.nodes):
        program = without_writes(program, "the ExportedProgram")
    module = program.module(check_guards=False)
    normalise(module.graph)
    args_spec, kwargs_spec = spec.in_spec.children()
    names = [*parameter_names(module.forward)[: args_spec.num_children], *(kwargs_spec.context or ())]
    structure = dict(zip(names, [*args_spec.children(), *kwargs_spec.children()], strict=True))
    examples = dict.fromkeys(names)
    if program.example_inputs is not None:
        args, kwargs = program.example_inputs
        examples = dict(zip(names, [*args, *kwargs.values()], strict=True))
    constants = {
        n: v
        for n, v in examples.items()
        if v is not None and not any(isinstance(x, Tensor) for x in pytree.tree_leaves(v))
    }
    optional = _optional({n: v for n, v in examples.items() if v is not None}, dict.fromkeys(names))
    call = Call(names, structure, constants, optional)
    _name_inputs(module.graph, call)
    return Traced(module, call, spec.out_spec, examples, None, _ranges(program))
