"""transformers, imported so that it never asks a hub for anything and draws no bars."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from modpass.errors import require

__all__ = ["no_progress_bar", "transformers_offline"]


def transformers_offline(extra: str) -> ModuleType:
    """Import ``transformers`` with its hub client switched off.

    Raises:
        MissingExtraError: transformers is not installed; the message names ``extra``.

    >>> transformers_offline("hf").__name__
    'transformers'
    """
    # The hub client reads this once, when it is first imported.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return require("transformers", extra)


@contextmanager
def no_progress_bar(transformers: ModuleType) -> Iterator[None]:
    """Keep transformers from drawing a bar while it fills a model from a local file.

    >>> with no_progress_bar(transformers_offline("hf")): pass
    """
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
