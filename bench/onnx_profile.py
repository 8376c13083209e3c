"""Where the time of an ONNX file goes, block by block: ONNX Runtime's profile, booked by module path."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import onnx_ir as ir
import onnxruntime

from modpass.errors import ExportError
from modpass.exporters.origins import MODULE

__all__ = ["block_seconds", "labelled"]

_MARK = "@"


def block_seconds(
    path: Path, feeds: Mapping[str, Any], blocks: Collection[str], threads: int = 0, calls: int = 3
) -> dict[str, float]:
    """Seconds of one call in each of ``blocks``, and outside of them under ``""``: medians over ``calls``.

    Each node gets its block's number into its name first, which ONNX Runtime carries through its fusions.
    Source: ``SessionOptions.enable_profiling`` of ONNX Runtime.

    Raises:
        ExportError: ONNX Runtime refuses the file.
    """
    names = list(blocks)
    with tempfile.TemporaryDirectory(prefix="modpass-profile-") as folder:
        labelled_file = Path(folder, "labelled.onnx")
        ir.save(labelled(ir.load(path), names), labelled_file, external_data="labelled.data")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder, "profile"))
        try:
            session = onnxruntime.InferenceSession(labelled_file, options, providers=["CPUExecutionProvider"])
        except Exception as e:  # pybind turns every kind of refusal into its own
            raise ExportError(f"ONNX Runtime {onnxruntime.__version__} cannot profile '{path}': {e}") from e
        for _ in range(calls + 1):
            session.run(None, dict(feeds))
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return _by_block(events, names, calls)


def labelled(model: ir.Model, blocks: Collection[str]) -> ir.Model:
    """Put into each node's name the number of the block that it is of, by the module path that the exporter noted.

    >>> node = ir.node("Relu", [ir.val("x")], name="relu", metadata_props={MODULE: "layers.1.act"})
    >>> graph = ir.Graph([], [], nodes=[node])
    >>> labelled(ir.Model(graph, ir_version=10), ["layers.0", "layers.1"]).graph[0].name
    '@1@relu'
    """
    numbers = {name: i for i, name in enumerate(blocks)}
    for count, node in enumerate(model.graph.all_nodes()):
        parts = node.metadata_props.get(MODULE, "").split(".")
        outward = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        number = next((numbers[path] for path in outward if path in numbers), None)
        node.name = f"{_MARK}{'' if number is None else number}{_MARK}{node.name or count}"
    return model


def _by_block(events: list[dict[str, Any]], names: list[str], calls: int) -> dict[str, float]:
    """Microseconds of kernels in ``events``, call by call; the first call, which fills caches, is dropped."""
    runs = sorted(e["ts"] for e in events if e["name"] == "model_run")[-calls:]
    spent: list[Counter[str]] = [Counter(dict.fromkeys([*names, ""], 0.0)) for _ in runs]
    for event in events:
        if event.get("cat") != "Node" or not event["name"].endswith("_kernel_time"):
            continue
        call = sum(event["ts"] >= start for start in runs) - 1
        if call >= 0:
            _, number, _ = f"{event['name']}{_MARK * 2}".split(_MARK, 2)
            spent[call][names[int(number)] if number.isdecimal() else ""] += event["dur"] / 1e6
    return {name: median(counter[name] for counter in spent) for name in [*names, ""]}
