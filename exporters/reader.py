"""Parsed JSON turned into dataclasses; where it does not fit, that is said in words."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from modpass.errors import StateError

__all__ = ["Kind", "Reader"]

Kind = type | tuple[type, ...]


@dataclass(frozen=True)
class Reader:
    """Checks what was read from the file ``path``.

    >>> Reader("m.json").typed("two", int, "batch")
    Traceback (most recent call last):
    modpass.errors.StateError: the manifest 'm.json': 'batch' must be int, found 'two'
    """

    path: str

    def build(self, cls: type, raw: Any, where: str, **kinds: Kind) -> Any:
        """``cls`` from a mapping; ``kinds`` are the types of its fields, ``where`` it stands in the file.

        Raises:
            StateError: it is no mapping, or a field is unknown, missing or of a wrong type.
        """
        self.typed(raw, dict, where)
        known = {f.name for f in fields(cls)}
        if unknown := sorted(raw.keys() - known):
            raise StateError(f"the manifest '{self.path}' has the unknown field '{_join(where, unknown[0])}'")
        for name, kind in kinds.items():
            if name in raw:
                self.typed(raw[name], kind, _join(where, name))
        try:
            return cls(**raw)
        except TypeError as e:
            missing = str(e).partition("missing")[2] or str(e)
            where = where or "fields"
            raise StateError(f"the manifest '{self.path}' misses {where}: {missing.strip()}") from e

    def typed(self, value: Any, kind: Kind, where: str) -> Any:
        """``value``, if it is of one of these types.

        Raises:
            StateError: it is not.
        """
        kinds = kind if isinstance(kind, tuple) else (kind,)
        # bool is an int to isinstance, but never a size
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
            raise StateError(f"the manifest '{self.path}': '{where}' must be {wanted}, found {value!r}")
        return value

    def counts(self, value: Any, where: str) -> tuple[int, ...]:
        """A list of whole numbers of 1 or more, such as a shape.

        Raises:
            StateError: it is not.

        >>> Reader("m.json").counts([2, 3], "shape")
        (2, 3)
        """
        return tuple(self.count(d, where) for d in self.typed(value, list, where))

    def count(self, value: Any, where: str) -> int:
        """A whole number of 1 or more.

        Raises:
            StateError: it is not.
        """
        if self.typed(value, int, where) < 1:
            raise StateError(f"the manifest '{self.path}': '{where}' must be 1 or more, found {value}")
        return int(value)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
