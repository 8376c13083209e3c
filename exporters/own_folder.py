"""A folder is replaced as a whole, so nothing but an earlier export may lie in it."""

from __future__ import annotations

import os
from pathlib import Path

from modpass.errors import InputError

__all__ = ["own_folder"]


def own_folder(folder: str | os.PathLike[str], marker: str) -> None:
    """Refuse a folder that holds something else than an earlier export, which would be replaced.

    Raises:
        InputError: it is such a folder, or a file.

    >>> own_folder(os.sep, "decoder.json")
    Traceback (most recent call last):
    modpass.errors.InputError: '/' holds other files, which an export would replace; name a folder of its own
    """
    path = Path(folder)
    if path.is_dir():
        if any(path.iterdir()) and not (path / marker).is_file():
            raise InputError(f"'{path}' holds other files, which an export would replace; name a folder of its own")
    elif path.exists():
        raise InputError(f"'{path}' is a file; name a folder")
