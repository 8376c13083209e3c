"""JSON files that carry their schema and their own SHA-256, so that no byte of them changes unnoticed.

The digest finds accidents: a cut download, a bad disk, a hand edit. It is no signature; whoever can write the
file can write a digest that fits.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modpass.errors import StateError
from modpass.files import whole_file
from modpass.version import __version__

__all__ = ["read_sealed", "write_sealed"]

_TAIL = re.compile(rb'"digest": "([0-9a-f]{64})"\n\}\n\Z')


def write_sealed(path: str | os.PathLike[str], schema: int, facts: Mapping[str, Any]) -> None:
    """Write ``facts`` as JSON, whole or not at all; the last field is the SHA-256 of all the rest.

    Raises:
        StateError: a value cannot be written as JSON.
    """
    try:
        text = json.dumps({"schema": schema, **facts, "digest": ""}, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as e:
        raise StateError(f"the manifest '{path}' cannot be written as JSON: {e}") from e
    open_ended = text.encode()
    tail = b'"\n}\n'
    sealed = open_ended.removesuffix(tail) + _digest(open_ended).encode() + tail
    with whole_file(path) as temporary:
        temporary.write_bytes(sealed)


def read_sealed(path: str | os.PathLike[str], schema: int, missing: str, again: str) -> dict[str, Any]:
    """The facts of a file that ``write_sealed`` wrote; ``missing`` says what to do where there is none, ``again``
    how to make a new one.

    Raises:
        StateError: there is no such file, it is no JSON, of another schema, or has changed since it was written.

    >>> import tempfile; path = Path(tempfile.mkdtemp(), "m.json")
    >>> write_sealed(path, 2, {"batch": 1}); read_sealed(path, 2, "export", "export again")
    {'batch': 1}
    >>> read_sealed(path, 3, "export", "export again")
    Traceback (most recent call last):
    modpass.errors.StateError: '...m.json' has schema 2, of an older modpass; this one (...) reads ...
    """
    try:
        content = Path(path).read_bytes()
        raw: Any = json.loads(content.decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError) as e:
        raise StateError(f"there is no manifest '{path}'; {missing}") from e
    except (OSError, ValueError, RecursionError) as e:
        raise StateError(f"the manifest '{path}' cannot be read: {e}; {again}") from e
    if not isinstance(raw, dict):
        raise StateError(f"the manifest '{path}' holds a {type(raw).__name__}, not an object; {again}")
    _check_schema(path, raw.get("schema"), schema, again)
    tail = _TAIL.search(content)
    if tail is None:
        raise StateError(f"the manifest '{path}' does not end with its own digest, so it has been changed; {again}")
    if _digest(content[: tail.start(1)] + content[tail.end(1) :]) != tail[1].decode():
        raise StateError(f"the manifest '{path}' has changed since it was written: its digest does not fit; {again}")
    return {k: v for k, v in raw.items() if k not in ("schema", "digest")}


def _check_schema(path: str | os.PathLike[str], found: Any, wanted: int, again: str) -> None:
    if isinstance(found, bool) or not isinstance(found, int):
        raise StateError(f"the manifest '{path}' has schema {found!r}, which is no version; {again}")
    if found < wanted:
        raise StateError(
            f"'{path}' has schema {found}, of an older modpass; this one ({__version__}) reads schema {wanted}; {again}"
        )
    if found > wanted:
        raise StateError(
            f"'{path}' has schema {found}, of a newer modpass; this one ({__version__}) reads schema {wanted}; "
            f"install the newer one, or {again}"
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
