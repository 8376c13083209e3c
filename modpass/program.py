"""``torch.export`` of a module: every dim free, every dropout rate known, nothing written in place."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from modpass.calling import parameter_names
from modpass.errors import TraceError
from modpass.record import evaluated

__all__ = ["experts_per_token", "export_program", "mutates", "plain_attention", "without_writes"]


def export_program(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """Trace a module with every dim free and every dropout rate known.

    Raises:
        TraceError: the model cannot be traced; names the model and torch's first line.

    >>> len(list(export_program(nn.ReLU(), (torch.zeros(2, 3),), {}).graph.nodes))
    3
    """
    with evaluated(model), experts_per_token(model), _without_cache(model):
        program = _export(model, args, kwargs)
        if any(mutates(n) for n in program.graph.nodes):
            return without_writes(program, type(model).__name__)  # which would take dropout apart as well
        return _with_dropout(model, args, kwargs, program) if _drops(model) else program


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


def _drops(model: nn.Module) -> bool:
    """Whether any module has a dropout rate above 0: an attribute or setting with 'drop' in its name."""
    holders = [*model.modules(), *([model.config] if hasattr(model, "config") else [])]
    rates = (v for h in holders for k, v in vars(h).items() if "drop" in k.lower() or k == "p")
    return any(isinstance(v, float) and v > 0 for v in rates)


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """``torch.export`` with every dim of every tensor input free."""

    def free(value: Any) -> Any:
        return dict.fromkeys(range(value.dim()), Dim.AUTO) if isinstance(value, Tensor) else None

    shapes: Any = pytree.tree_map(free, (args, kwargs))
    names = parameter_names(model.forward)[: len(args)]
    spec = dict(zip(names, shapes[0], strict=False)) | shapes[1]
    try:
        with plain_attention(), _every_input_named(model, kwargs):
            program = torch.export.export(model, args, kwargs, dynamic_shapes=spec, strict=False)
            if any("set_grad_enabled" in str(n.target) for n in program.graph.nodes):
                with torch.no_grad():  # else a no_grad part of the model hides in a graph of its own
                    program = torch.export.export(model, args, kwargs, dynamic_shapes=spec, strict=False)
    except Exception as e:
        raise TraceError(f"{type(model).__name__} cannot be traced by torch.export: {_first_line(e)}") from e
    return program


def without_writes(program: ExportedProgram, name: str) -> ExportedProgram:
    """The same program without in-place operators, and without the trace's own checks of its inputs.

    Those are left out of every graph here, and fail in the run that this takes where an input goes by keyword.
    """
    if hasattr(program, "_guards_code"):
        program._guards_code = []
    try:
        written: ExportedProgram = program.run_decompositions({})
    except Exception as e:
        raise TraceError(f"{name} cannot be rid of its in-place operators: {_first_line(e)}") from e
    return written


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def mutates(node: fx.Node) -> bool:
    """Whether an operator writes into one of its inputs."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


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


@contextmanager
def plain_attention() -> Iterator[None]:
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
