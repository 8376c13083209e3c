"""What the commands print with: results on the output stream, progress on the error stream."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

__all__ = ["console", "grid", "mebibytes", "progress", "progresses", "status"]

# A table in a file or a pipe is not cut to the width of some terminal.
PIPED_WIDTH = 1000


def console() -> Console:
    """The output stream, without colours and wrapping where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def grid(*headings: str, title: str | None = None, numbers: tuple[str, ...] = ()) -> Table:
    """A table with these columns; those in ``numbers`` are aligned to the right."""
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(Text(heading), justify="right" if heading in numbers else "left", overflow="fold")
    return table


def mebibytes(count: int) -> str:
    """A size in MiB.

    >>> mebibytes(3 * 2**19)
    '1.5 MiB'
    """
    return f"{count / 2**20:.1f} MiB"


@contextmanager
def status(what: str) -> Iterator[None]:
    """Show on a terminal what is being done."""
    with Console(stderr=True).status(what):
        yield


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal; the function that is yielded takes (what, steps done, steps expected or 0)."""
    with progresses(1) as (tell,):
        yield tell


@contextmanager
def progresses(count: int) -> Iterator[tuple[Callable[[str, int, int], None], ...]]:
    """As many bars as ``count``, the first on top, and a function for each."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:

        def teller() -> Callable[[str, int, int], None]:
            task = bar.add_task("")
            return lambda what, done, expected: bar.update(
                task, description=what, completed=done, total=expected or None
            )

        yield tuple(teller() for _ in range(count))
