"""What is asked of a decoder, checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from modpass.errors import InputError
from modpass.exporters.decoder_manifest import DecoderManifest
from modpass.exporters.sampling import is_whole

__all__ = ["Stream", "check_request"]

Stream = Callable[[int, int], None]


def check_request(manifest: DecoderManifest, prompts: Any, max_new_tokens: Any, stop: Any, stream: Any) -> None:
    """Refuse what a decoder cannot continue; the arguments are those of ``DecoderSession.generate``.

    Raises:
        InputError: says which argument, what it is and what it may be.

    >>> check_request(None, [[1]], 0, (), None)
    Traceback (most recent call last):
    modpass.errors.InputError: max_new_tokens is 0; it must be a whole number of 1 or more
    """
    if not (is_whole(max_new_tokens) and max_new_tokens >= 1):
        raise InputError(f"max_new_tokens is {max_new_tokens!r}; it must be a whole number of 1 or more")
    if (not _is_list(stop) and not isinstance(stop, set | frozenset)) or not all(map(is_whole, stop)):
        raise InputError(f"stop is {stop!r}; give the token ids that end a row, such as [2]")
    if stream is not None and not callable(stream):
        raise InputError(f"stream is {stream!r}; give a function of (row, token), or None")
    if not _is_list(prompts):
        raise InputError(f"prompts is {prompts!r}; give a list with a list of token ids for each row")
    if not 1 <= len(prompts) <= manifest.batch:
        raise InputError(f"{len(prompts)} prompts were given; this decoder takes 1 to {manifest.batch}")
    for row, prompt in enumerate(prompts):
        _check_prompt(manifest, row, prompt, max_new_tokens)


def _check_prompt(manifest: DecoderManifest, row: int, prompt: Any, more: int) -> None:
    if not _is_list(prompt) or not all(is_whole(t) and t >= 0 for t in prompt):
        raise InputError(f"prompt {row} is {prompt!r}; give a list of token ids, whole numbers of 0 or more")
    if not prompt:
        raise InputError(f"prompt {row} is empty; give at least one token")
    if max(prompt) >= manifest.vocabulary:
        raise InputError(
            f"prompt {row} has the token id {max(prompt)}; this model's are 0 to {manifest.vocabulary - 1} "
            f"(is the tokenizer that of another model?)"
        )
    if len(prompt) + more > manifest.max_sequence:
        raise InputError(
            f"prompt {row} has {len(prompt)} tokens and {more} more are asked for; the caches hold "
            f"{manifest.max_sequence} (export with a larger max_sequence, or ask for fewer)"
        )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
