"""The ``config.pbtxt`` of one model of NVIDIA Triton Inference Server, as text of its protobuf schema.

Written by hand: the schema's own classes come with a client of Triton and its dependencies, and what is needed of the
format is a dozen fields. The tests parse each file into ``ModelConfig`` with those classes.
Source: ``model_config.proto`` of triton-inference-server/common.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modpass.errors import ExportError
from modpass.exporters.manifest import TensorSpec

__all__ = ["Instances", "config_text", "data_type"]

_TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
}


class _Word(str):
    """A name of the schema, which stands without quotes."""


@dataclass(frozen=True)
class Instances:
    """How many copies of a model run side by side, and where: kind "cpu", "gpu" or "auto" (a GPU if there is one)."""

    count: int = 1
    kind: str = "auto"


def data_type(dtype: str, name: str) -> str:
    """Triton's word for a dtype.

    Raises:
        ExportError: it has none.

    >>> data_type("int64", "input_ids")
    'TYPE_INT64'
    """
    if dtype not in _TYPES:
        raise ExportError(f"'{name}' is {dtype}, which Triton has no type for")
    return _TYPES[dtype]


def config_text(
    name: str,
    platform: str,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    *,
    file: str,
    instances: Instances,
    threads: int | None = None,
    warmup: Mapping[str, str | None] | None = None,
) -> str:
    """The text of a ``config.pbtxt``.

    Args:
        name: of the model, which is also its directory's.
        platform: ``"onnxruntime_onnx"`` or ``"tensorrt_plan"``.
        inputs, outputs: with whole shapes: ``max_batch_size`` is 0, as a graph of a fixed batch takes no other.
        file: of the model in its version's directory.
        instances: copies of the model.
        threads: processor threads of an operator in ONNX Runtime.
        warmup: for each input a file in ``warmup/``, or None for zeros; a model is ready when it ran once over them.

    Raises:
        ExportError: a dtype that Triton does not have.

    >>> spec = (TensorSpec("ids", (1, 8), "int64"),)
    >>> text = config_text("m_1x8", "onnxruntime_onnx", spec, spec, file="model.onnx", instances=Instances())
    >>> "dims: [1, 8]" in text
    True
    """
    fields: dict[str, Any] = {
        "name": name,
        "platform": platform,
        "max_batch_size": 0,
        "default_model_filename": file,
        "input": [_tensor(s) for s in inputs],
        "output": [_tensor(s) for s in outputs],
        "instance_group": [{"count": instances.count, "kind": _Word(f"KIND_{instances.kind.upper()}")}],
    }
    if threads is not None:
        fields["parameters"] = [{"key": "intra_op_thread_count", "value": {"string_value": str(threads)}}]
    if warmup is not None:
        entries = [{"key": s.name, "value": _sample(s, warmup.get(s.name))} for s in inputs]
        fields["model_warmup"] = [{"name": "once", "batch_size": 1, "inputs": entries}]
    return "".join(_lines(fields, ""))


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    found: dict[str, Any] = {"name": spec.name, "data_type": _Word(data_type(spec.dtype, spec.name))}
    if not spec.shape:  # Triton lists one dim at least, and is told that the model has none
        return found | {"dims": [1], "reshape": {"shape": []}}
    return found | {"dims": list(spec.shape)}


def _sample(spec: TensorSpec, file: str | None) -> dict[str, Any]:
    dims = {"data_type": _Word(data_type(spec.dtype, spec.name)), "dims": list(spec.shape or (1,))}
    return dims | ({"zero_data": True} if file is None else {"input_data_file": file})


def _lines(fields: Mapping[str, Any], indent: str) -> list[str]:
    """One line a field; a list of messages is the field repeated."""
    lines = []
    for name, value in fields.items():
        for item in value if isinstance(value, list) and value and isinstance(value[0], dict) else [value]:
            if isinstance(item, dict):
                lines += [f"{indent}{name} {{\n", *_lines(item, indent + "  "), f"{indent}}}\n"]
            else:
                lines.append(f"{indent}{name}: {_value(item)}\n")
    return lines


def _value(value: Any) -> str:
    return value if isinstance(value, _Word) else json.dumps(value, ensure_ascii=False)  # the formats agree on these
