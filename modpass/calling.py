"""The traced model is called exactly like the original: same parameter names, same output structure."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from modpass.errors import InputError

__all__ = ["UNSET", "Call", "CallCodeGen", "InputCheck", "parameter_names"]


class _Unset:
    def __repr__(self) -> str:
        return "<not given>"


UNSET = _Unset()


def parameter_names(function: Any) -> list[str]:
    """The names by which ``function`` takes its inputs, in positional order.

    >>> parameter_names(lambda input_ids, attention_mask=None: None)
    ['input_ids', 'attention_mask']
    """
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]


@dataclass(frozen=True)
class InputCheck:
    """What the trace fixed of a tensor input: its rank, and the sizes that are numbers or have bounds."""

    dims: tuple[int | str, ...]
    bounds: tuple[tuple[int, int | None], ...]

    def against(self, name: str, value: Any) -> None:
        """Raise InputError where a given tensor does not fit the trace."""
        if not isinstance(value, torch.Tensor):
            return
        if value.dim() != len(self.dims):
            raise InputError(f"input '{name}' has {value.dim()} dims; it was traced with {len(self.dims)}: {self}")
        for size, dim, (low, high) in zip(value.shape, self.dims, self.bounds, strict=True):
            if isinstance(dim, int) and size != dim:
                raise InputError(f"input '{name}' has shape {list(value.shape)}; the trace fixed it to {self}")
            if isinstance(dim, str) and (size < low or (high is not None and size > high)):
                limit = f"{low} or more" if high is None else f"{low} to {high}"
                raise InputError(f"input '{name}' has {dim} {size}; the trace holds for {limit}")

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.dims))}]"


@dataclass
class Call:
    """How the model was called when it was traced, and so how it may be called now.

    names: the original's parameters in order; structure: the pytree of each traced one; constants: traced values
    that are no tensors; optional: masks that may be left out (they become all ones, shaped like the first two
    dims of the input they belong to); defaults: the original's own defaults.
    """

    names: list[str]
    structure: dict[str, pytree.TreeSpec]
    constants: dict[str, Any] = field(default_factory=dict)
    optional: dict[str, tuple[str, torch.dtype]] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, InputCheck] = field(default_factory=dict)

    def bind(self, given: Mapping[str, Any]) -> list[Any]:
        """The flat values of the graph's placeholders, in order.

        Raises:
            InputError: an input is missing, was not traced, or has another structure.
        """
        for name, value in given.items():
            if name not in self.structure and value is not UNSET:
                self._refuse_untraced(name, value)
        leaves: list[Any] = []
        for name, spec in self.structure.items():
            value = given.get(name, UNSET)
            found, found_spec = pytree.tree_flatten(self._value(name, value, given))
            if found_spec != spec:
                raise InputError(f"input '{name}' has the structure {found_spec}; it was traced with {spec}")
            leaves.extend(found if name not in self.constants else [])
        for name, check in self.checks.items():
            check.against(name, given.get(name))
        return leaves

    def _value(self, name: str, value: Any, given: Mapping[str, Any]) -> Any:
        absent = value is UNSET or value is None
        if name in self.constants:
            constant = self.constants[name]
            if absent or value is constant or value == constant:
                return constant
            raise InputError(
                f"input '{name}' was traced as the constant {constant!r}; {value!r} needs another "
                f"trace: give it in example_inputs"
            )
        if not absent:
            return value
        if name in self.optional:
            main, dtype = self.optional[name]
            reference = given[main]
            return torch.ones(reference.shape[:2], dtype=dtype, device=reference.device)
        raise InputError(f"input '{name}' is missing; the model was traced with: {', '.join(self.structure)}")

    def _refuse_untraced(self, name: str, value: Any) -> None:
        if value is None or (name in self.defaults and self.defaults[name] is value):
            return
        raise InputError(
            f"input '{name}' was not traced; the graph takes: {', '.join(self.structure)}. "
            f"Give '{name}' in example_inputs to trace it in"
        )


class CallCodeGen(CodeGen):
    """Generates ``forward`` with the original's parameter names around the flat graph."""

    def __init__(self, call: Call, out_spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.call, self.out_spec = call, out_spec

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        """Write the signature and the line that binds the call to the placeholders."""
        flat = [v.split(":")[0].split("=")[0].strip() for v in free_vars]
        names = [n for n in dict.fromkeys([*self.call.names, *self.call.structure]) if n.isidentifier()]
        parameters = ", ".join(["self", *(f"{n}=_UNSET" for n in names), "**others"])
        given = ", ".join([*(f"'{n}': {n}" for n in names), "**others"])
        bound = f"    {', '.join(flat)}, = _bind({{{given}}})" if flat else f"    _bind({{{given}}})"
        return f"def forward({parameters}):\n{bound}"

    def generate_output(self, output_args: Any, **_: Any) -> str:
        """Write the line that rebuilds the original's output structure."""
        return f"return _unflatten({output_args!r})"

    def additional_globals(self) -> list[tuple[str, Any]]:
        """Return the names that the generated code uses."""
        return [("_UNSET", UNSET), ("_bind", self.call.bind), ("_unflatten", self.process_outputs)]

    def process_outputs(self, outputs: Any) -> Any:
        """Rebuild the output structure when an interpreter runs the graph."""
        return pytree.tree_unflatten(outputs, self.out_spec)

    def process_inputs(self, *args: Any) -> Sequence[Any]:
        """Take flat placeholder values when an interpreter runs the graph."""
        return args
