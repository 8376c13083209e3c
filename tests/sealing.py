"""Manifests with other facts, sealed again as if they had been written so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modpass.exporters.sealed import write_sealed


def change(path: Path, **facts: Any) -> None:
    """Put other facts into a manifest; None takes one out."""
    raw = {**json.loads(path.read_text()), **facts}
    schema = raw.pop("schema")
    write_sealed(path, schema, {k: v for k, v in raw.items() if k != "digest" and v is not None})
