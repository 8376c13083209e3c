"""``modpass.json``: what a saved model needs, beside its weights, to be traced again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modpass.errors import StateError
from modpass.model import RoutedModel
from modpass.version import __version__

__all__ = ["FILE", "SCHEMA", "SavedState", "describe_examples", "draw_examples", "dtype_name"]

FILE = "modpass.json"
SCHEMA = 1
VERSIONS = {"modpass": __version__, "torch": str(torch.__version__)}
SETTINGS = ("capacity", "gate", "selection", "padding_mask")
# Absent from files of earlier versions, which did without.
LATER: dict[str, tuple[type, ...]] = {"parts": (str,), "predictor": (bool,), "eval_selection": (str,)}


@dataclass(frozen=True)
class SavedState:
    """The content of ``modpass.json``.

    settings: the transform's, empty for a dense trace; source: how to build the dense model; attention:
    "eager" where the trace holds no fused attention; inputs: dtype of each traced input by name; examples:
    how to draw example inputs, None where the caller must give them; tied: each further name of a stored
    tensor, and the name that it is stored under; buffers: stored tensors that no ``state_dict`` holds.

    >>> import tempfile
    >>> saved = SavedState({}, {"kind": "module"}, None, {"x": "float32"}, None)
    >>> folder = Path(tempfile.mkdtemp()); saved.save(folder); SavedState.load(folder) == saved
    True
    """

    settings: Mapping[str, Any]
    source: Mapping[str, Any]
    attention: str | None
    inputs: Mapping[str, str]
    examples: Mapping[str, Any] | None
    tied: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=lambda: dict(VERSIONS))

    def save(self, folder: Path) -> None:
        """Write the file into ``folder``.

        Raises:
            StateError: a setting or the model's configuration is no JSON.
        """
        try:
            text = json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2, allow_nan=False)
        except (TypeError, ValueError) as e:
            raise StateError(f"the model's settings or configuration cannot be written as JSON: {e}") from e
        (folder / FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> SavedState:
        """Read and check the file in ``folder``.

        Raises:
            StateError: it is missing, no JSON, of another schema, or a field is missing or of a wrong type.
        """
        path = folder / FILE
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError) as e:
            raise StateError(f"'{folder}' is no folder saved by modpass: it has no {FILE}") from e
        except (OSError, ValueError) as e:
            raise StateError(f"'{path}' cannot be read: {e}") from e
        found = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
        if found != SCHEMA:
            raise StateError(
                f"'{path}' has schema {found!r}, this modpass ({__version__}) reads schema "
                f"{SCHEMA}; save the model again"
            )
        return _checked({k: v for k, v in raw.items() if k != "schema"}, path)


_TYPES: dict[str, tuple[type, ...]] = {
    "settings": (dict,),
    "source": (dict,),
    "attention": (str, type(None)),
    "inputs": (dict,),
    "examples": (dict, type(None)),
    "tied": (dict,),
    "buffers": (list,),
    "versions": (dict,),
}
_JSON = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}


def _checked(raw: dict[str, Any], path: Path) -> SavedState:
    names = [f.name for f in fields(SavedState)]
    for name in names:
        if name not in raw:
            raise StateError(f"'{path}' has no field '{name}'; save the model again")
        _expect(raw[name], _TYPES[name], name, path)
    if unknown := [n for n in raw if n not in names]:
        raise StateError(f"'{path}' has the field '{unknown[0]}', which schema {SCHEMA} does not have")
    for name in ("inputs", "tied", "versions"):
        for key, value in raw[name].items():
            _expect(value, (str,), f"{name}.{key}", path)
    for i, value in enumerate(raw["buffers"]):
        _expect(value, (str,), f"buffers.{i}", path)
    _check_settings(raw["settings"], path)
    return SavedState(**{**raw, "buffers": tuple(raw["buffers"])})


def _check_settings(settings: dict[str, Any], path: Path) -> None:
    for name in (*SETTINGS, *LATER) if settings else ():
        if name in LATER and name not in settings:
            continue
        if name not in settings:
            raise StateError(f"'{path}' has no setting '{name}'; save the model again")
        _expect(settings[name], LATER.get(name, (dict,) if name == "capacity" else (str,)), f"settings.{name}", path)
    if unknown := [n for n in settings if n not in (*SETTINGS, *LATER)]:
        raise StateError(
            f"'{path}' has the setting '{unknown[0]}', which this modpass ({__version__}) does "
            f"not know; it knows: {', '.join((*SETTINGS, *LATER))}"
        )


def _expect(value: Any, allowed: tuple[type, ...], name: str, path: Path) -> None:
    if not isinstance(value, allowed):
        wanted = " or ".join(_JSON[t] for t in allowed)
        raise StateError(f"'{path}': '{name}' is {json.dumps(value)[:60]}; it must be {wanted}")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module.

    >>> dtype_name(torch.int64)
    'int64'
    """
    return str(dtype).removeprefix("torch.")


# Example inputs: kept as facts, not as values, which may be somebody's data.


def describe_examples(model: RoutedModel) -> dict[str, Any] | None:
    """Shape, dtype and range of each example input, and the constants of the call, by argument name.

    None where they are more than tensors and plain constants, or where the trace came without examples.

    >>> import modpass
    >>> describe_examples(modpass.trace(torch.nn.ReLU(), (torch.ones(2, 3),)))
    {'input': {'shape': [2, 3], 'dtype': 'float32', 'low': None, 'high': None}}
    """
    call, tensors = model.info.call, iter(model.inputs)
    found: dict[str, Any] = {}
    for name, structure in call.structure.items():
        if name in call.constants:
            constant = call.constants[name]
            if not isinstance(constant, bool | int | float | str | None):
                return None
            found[name] = {"constant": constant}
            continue
        example = next(tensors).example if structure.is_leaf() else None
        if example is None or example.is_complex():
            return None
        found[name] = _describe(example)
    return found


def _describe(example: Tensor) -> dict[str, Any]:
    exact = not example.is_floating_point() and example.numel() > 0
    return {
        "shape": list(example.shape),
        "dtype": dtype_name(example.dtype),
        "low": int(example.min()) if exact else None,
        "high": int(example.max()) if exact else None,
    }


def draw_examples(described: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Example inputs like the described ones: noise, or whole numbers over the same range.

    Raises:
        StateError: an entry is not what ``describe_examples`` writes.

    >>> draw_examples({"mask": {"shape": [1, 2], "dtype": "int64", "low": 1, "high": 1}}, torch.device("cpu"))
    {'mask': tensor([[1, 1]])}
    """
    generator = torch.Generator().manual_seed(0)
    drawn: dict[str, Any] = {}
    for name, entry in described.items():
        try:
            drawn[name] = entry["constant"] if "constant" in entry else _draw(entry, generator).to(device)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as e:
            raise StateError(
                f"{FILE}: the example of input '{name}' is {json.dumps(entry)[:100]}; it needs "
                "shape, dtype, low and high, or a constant; save the model again"
            ) from e
    return drawn


def _draw(entry: Mapping[str, Any], generator: torch.Generator) -> Tensor:
    shape, dtype = tuple(entry["shape"]), getattr(torch, entry["dtype"])
    if entry["low"] is None:
        return torch.randn(shape, generator=generator).to(dtype)
    values = torch.randint(entry["low"], entry["high"] + 1, shape, generator=generator).flatten()
    # Both ends occur, so that what is drawn from these later covers the range too.
    values[0], values[-1] = entry["low"], entry["high"]
    return values.view(shape).to(dtype)
