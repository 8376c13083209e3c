"""The parts of a study that are done, each kept beside the settings that it depends on, so that none is done twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from modpass.errors import StateError
from modpass.files import whole_file

__all__ = ["kept", "same_settings"]


def kept(path: Path, settings: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``make`` gives, from ``path`` where an earlier call kept it; as JSON, or with tensors where it ends in .pt.

    Raises:
        StateError: the file is of a run with other settings.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [kept(Path(folder, "a.json"), {}, lambda: {"loss": loss}) for loss in (1.0, 2.0)]
    [{'loss': 1.0}, {'loss': 1.0}]
    """
    settings = json.loads(json.dumps(settings))  # as they come back: no tuples
    if path.exists():
        found = _read(path)
        same_settings(found["settings"], settings, path)
        result: dict[str, Any] = found["result"]
        return result
    result = make()
    record = {"settings": settings, "result": result}
    with whole_file(path) as temporary:
        if path.suffix == ".pt":
            torch.save(record, temporary)
        else:
            temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return result


def same_settings(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    """Refuse what an earlier call kept of a run with other settings.

    Raises:
        StateError: they differ.
    """
    if found != wanted:
        raise StateError(f"'{path}' is of a run with other settings; give another folder, or remove it")


def _read(path: Path) -> dict[str, Any]:
    if path.suffix == ".pt":
        found: dict[str, Any] = torch.load(path, weights_only=True)
    else:
        found = json.loads(path.read_text(encoding="utf-8"))
    return found
