"""Any model -> a graph of ATen ops that is parametric in batch and sequence."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from modpass.calling import Call, parameter_names
from modpass.errors import InputError, TraceError
from modpass.inputs import as_named, widen
from modpass.normalise import normalise

__all__ = ["Traced", "capture", "experts_per_token", "export_program"]


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
    return Traced(graph_module, call, program.call_spec.out_spec, named, model, _ranges(program))


def export_program(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """Trace a module with every dim free and every dropout rate known.

    Raises:
        TraceError: the model cannot be traced; names the model and torch's first line.

    >>> len(list(export_program(nn.ReLU(), (torch.zeros(2, 3),), {}).graph.nodes))
    3
    """
    before = {m: m.training for m in model.modules()}
    try:
        with experts_per_token(model), _without_cache(model):
            program = _export(model.eval(), args, kwargs)
            if any(_mutates(n) for n in program.graph.nodes):
                return _without_writes(program, type(model).__name__)  # which would take dropout apart as well
            return _with_dropout(model, args, kwargs, program) if _drops(model) else program
    finally:
        for module, flag in before.items():
            module.training = flag


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """``torch.export`` with every dim of every tensor input free."""

    def free(value: Any) -> Any:
        return dict.fromkeys(range(value.dim()), Dim.AUTO) if isinstance(value, Tensor) else None

    shapes: Any = pytree.tree_map(free, (args, kwargs))
    names = parameter_names(model.forward)[: len(args)]
    spec = dict(zip(names, shapes[0], strict=False)) | shapes[1]
    try:
        with _plain_attention(), _every_input_named(model, kwargs):
            program = torch.export.export(model, args, kwargs, dynamic_shapes=spec, strict=False)
            if any("set_grad_enabled" in str(n.target) for n in program.graph.nodes):
                with torch.no_grad():  # else a no_grad part of the model hides in a graph of its own
                    program = torch.export.export(model, args, kwargs, dynamic_shapes=spec, strict=False)
    except Exception as e:
        raise TraceError(f"{type(model).__name__} cannot be traced by torch.export: {_first_line(e)}") from e
    return program


def _without_writes(program: ExportedProgram, name: str) -> ExportedProgram:
    """The same program without in-place operators."""
    try:
        written: ExportedProgram = program.run_decompositions({})
    except Exception as e:
        raise TraceError(f"{name} cannot be rid of its in-place operators: {_first_line(e)}") from e
    return written


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def _every_input_named(model: nn.Module, kwargs: dict[str, Any]) -> Iterator[None]:
    """Let the forward name what it takes through ``**kwargs``: torch.export asks for that in two ways at once."""
    forward, signature = model.forward, inspect.signature(model.forward)
    loose = [n for n in kwargs if n not in signature.parameters]
    if not loose:
        yield
        return

    def named(*args: Any, **given: Any) -> Any:
        return forward(*args, **given)

    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in loose]
    named.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    before = vars(model).get("forward")
    object.__setattr__(model, "forward", named)
    try:
        yield
    finally:
        object.__delattr__(model, "forward")
        if before is not None:
            object.__setattr__(model, "forward", before)


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


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


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Keep nn.TransformerEncoder off its fused inference path, which hides attention in one operator."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextmanager
def experts_per_token(model: nn.Module) -> Iterator[None]:
    """Let Hugging Face mixtures of experts multiply token by token while tracing.

    Their default sorts the token-expert pairs of the whole batch and calls an operator that no exporter knows.
    """
    choose, current = getattr(model, "set_experts_implementation", None), getattr(model, "config", None)
    before = getattr(current, "_experts_implementation", None)
    if choose is None or before is None:
        yield
        return
    choose("batched_mm")
    try:
        yield
    finally:
        choose(before)


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Trace the plain forward of a Hugging Face model, also where ``use_cache`` is a setting alone."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    before = [(c, c.use_cache) for c in {id(c): c for c in (config, text)}.values() if hasattr(c, "use_cache")]
    for c, _ in before:
        c.use_cache = False
    try:
        yield
    finally:
        for c, value in before:
            c.use_cache = value


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


def _drops(model: nn.Module) -> bool:
    """Whether any module has a dropout rate above 0: an attribute or setting with 'drop' in its name."""
    holders = [*model.modules(), *([model.config] if hasattr(model, "config") else [])]
    rates = (v for h in holders for k, v in vars(h).items() if "drop" in k.lower() or k == "p")
    return any(isinstance(v, float) and v > 0 for v in rates)


def _with_dropout(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], evaluated: ExportedProgram
) -> ExportedProgram:
    """The same graph traced in training mode, which alone names every dropout rate; or ``evaluated`` where
    training takes another path through the code.
    """
    try:
        trained = _export(model.train(), args, kwargs)
    except TraceError:
        return evaluated
    return trained if _operators(trained) == _operators(evaluated) else evaluated


def _operators(program: ExportedProgram) -> list[str]:
    """The graph's operators with their constants, but for those of dropout."""
    silent = ("dropout", "contiguous", "clone", "_assert", "alias", "detach")
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    return [_with_constants(n) for n in nodes if not any(s in str(n.target) for s in silent)]


def _with_constants(node: fx.Node) -> str:
    is_attention = "scaled_dot_product_attention" in str(node.target)
    given = (node.args[:4], node.args[5:]) if is_attention else (node.args, node.kwargs)
    return f"{node.target} {fx.map_arg(given, lambda n: '_')}"


def _from_program(program: ExportedProgram) -> Traced:
    spec = program.call_spec
    if spec.in_spec is None or spec.out_spec is None:
        raise TraceError("the ExportedProgram does not record its call; export it again with this torch")
    if any(_mutates(n) for n in program.graph.nodes):
        program = _without_writes(program, "the ExportedProgram")
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
    return Traced(module, Call(names, structure, constants, optional), spec.out_spec, examples, None, _ranges(program))
