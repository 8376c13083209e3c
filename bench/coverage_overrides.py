"""What an architecture demands of its own sizes, where the names of its fields do not say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["overrides_for"]

_OVERRIDES: dict[str, dict[str, Any]] = {}


def overrides_for(model_type: str, small: Mapping[str, Any]) -> dict[str, Any]:
    """The fields to set for a model type; empty for nearly all.

    >>> overrides_for("llama", {})
    {}
    """
    return dict(_OVERRIDES.get(model_type, {}))
