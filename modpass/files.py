"""Files are written whole or not at all: to a temporary name beside the target, then renamed."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modpass.errors import StateError

__all__ = ["sha256", "whole_directory", "whole_file"]


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path that becomes ``path`` when the block ends well, and is removed when it does not.

    >>> target = Path(tempfile.mkdtemp(), "note.txt")
    >>> with whole_file(target) as tmp: _ = tmp.write_text("whole")
    >>> target.read_text()
    'whole'
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        temporary = Path(folder, target.name)
        yield temporary
        os.replace(temporary, target)


@contextmanager
def whole_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder; when the block ends well it replaces ``path``, else it is removed.

    An older folder of that name is moved aside first and put back if the swap fails. Of two that are written at once
    the first stays.

    Raises:
        StateError: another run wrote the folder meanwhile.

    >>> target = Path(tempfile.mkdtemp(), "model")
    >>> with whole_directory(target) as tmp: _ = (tmp / "a.json").write_text("{}")
    >>> [p.name for p in target.iterdir()]
    ['a.json']
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        fresh, old = Path(folder, "new"), Path(folder, "old")
        fresh.mkdir()
        yield fresh
        if target.exists():
            os.replace(target, old)
        try:
            os.replace(fresh, target)
        except OSError as e:
            if target.exists():  # moved there, the old one would lie inside of it
                raise StateError(f"'{target}' was written by another run meanwhile, and stays as that left it") from e
            if old.exists():
                shutil.move(old, target)
            raise


def sha256(path: str | os.PathLike[str]) -> str:
    """Hex SHA-256 of a file, read in pieces.

    >>> with tempfile.NamedTemporaryFile() as f: sha256(f.name)[:8]
    'e3b0c442'
    """
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
