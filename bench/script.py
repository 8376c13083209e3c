"""What the scripts of this room have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable

from modpass.errors import ModpassError

__all__ = ["exit_code"]


def exit_code(work: Callable[[], None]) -> int:
    """Do the work; an error of ours is one sentence on the error stream, and 1.

    >>> exit_code(lambda: None)
    0
    """
    try:
        work()
    except ModpassError as e:
        print(f"modpass: {e}", file=sys.stderr)
        return 1
    return 0
