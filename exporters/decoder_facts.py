"""The manifest of a decoder, read from its two derived graphs."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from torch import fx

from modpass.decode import Cache, Routing, StepModel
from modpass.exporters.decoder_manifest import CacheEntry, DecoderManifest, RoutingEntry, StateEntry
from modpass.mixing import LAYOUT, name_of

__all__ = ["describe", "logits_of", "vocabulary"]

_KEEPS = LAYOUT | {"to", "_to_copy"}


def describe(
    step: StepModel, prompt: int, vocabulary: int, dtype: str, skipping: str, files: Mapping[str, str]
) -> DecoderManifest:
    """The manifest of a decoder whose step this is."""

    def entry(cache: Cache) -> CacheEntry:
        return CacheEntry(cache.name, cache.shape, cache.dim)

    def routing(r: Routing) -> RoutingEntry:
        return RoutingEntry(r.block, r.slots, r.count, r.places, tuple(map(entry, r.caches)))

    info = step.info
    return DecoderManifest(
        batch=info.batch,
        prompt=prompt,
        max_sequence=info.max_sequence,
        vocabulary=vocabulary,
        dtype=dtype,
        skipping=skipping,
        tokens=info.tokens[0].name,
        logits=logits_of(step),
        caches=tuple(map(entry, info.dense_caches)),
        routing=tuple(map(routing, info.routing)),
        files=files,
        states=tuple(StateEntry(s.name, s.shape) for s in info.states),
    )


def logits_of(step: StepModel) -> str:
    """The output with scores over the vocabulary: the one called so, else the first."""
    names = step.info.model_outputs
    return "logits" if "logits" in names else names[0]


def vocabulary(step: StepModel, width: int) -> int:
    """How many token ids the model can read and give: rows of the tables they are looked up in, at most ``width``.

    >>> from modpass.decode import decode_step
    >>> from modpass.decode.example import tiny_decoder
    >>> vocabulary(decode_step(tiny_decoder(), batch=1, max_sequence=8), 16)
    11
    """
    lookups = [n for n in step.graph.nodes if n.op == "call_function" and name_of(n) == "embedding"]
    tables: list[Any] = [n.args[0] for n in lookups if _is_tokens(n.args[1], step.info.tokens[0].name)]
    held = [t for t in tables if isinstance(t, fx.Node) and t.op == "get_attr"]
    return min([width, *(int(attrgetter(str(t.target))(step).shape[0]) for t in held)])


def _is_tokens(node: Any, tokens: str) -> bool:
    """Whether a node is the input of that name, perhaps in another dtype or shape."""
    while isinstance(node, fx.Node) and node.op == "call_function" and name_of(node) in _KEEPS:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.op == "placeholder" and node.target == tokens
