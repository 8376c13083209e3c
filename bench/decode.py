"""Decode, one token at a time: dense beside routed, beside what else there is, in tokens per second."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, fx

from modpass.bench.decode_peers import ConcatenatedCache, hugging_face
from modpass.bench.sources import Source
from modpass.bench.timing import Timing, interleave, ratio
from modpass.errors import InputError
from modpass.exporters.backend import OnnxRuntimeBackend
from modpass.exporters.decoder import export_decoder
from modpass.exporters.session import DecoderSession, Statistics
from modpass.mixing import name_of
from modpass.model import RoutedModel
from modpass.symbols import value_of
from modpass.transform import mod_transform, trace

__all__ = ["DecodeResult", "decode_table", "run_decode", "set_share"]

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DecodeResult:
    """Seconds per round of ``steps`` tokens for each way to decode, and what the routed one read and skipped.

    dense_bytes, routed_bytes: weights and caches that a step reads, on average over the measured steps.
    """

    name: str
    max_sequence: int
    steps: int
    samples: dict[str, tuple[float, ...]]
    skipped_share: float
    dense_bytes: float
    routed_bytes: float
    dense_cache_bytes: int
    routed_cache_bytes: int

    @property
    def ideal(self) -> float:
        """How many times fewer bytes a routed step reads."""
        return self.dense_bytes / self.routed_bytes

    def speedup(self, name: str, over: str = "dense") -> float:
        """How many times faster ``name`` is than ``over``: the median of the ratios of each round."""
        return ratio(Timing(self.samples[over]), Timing(self.samples[name])).value

    def tokens_per_second(self, name: str) -> float:
        """At the median round."""
        return self.steps / Timing(self.samples[name]).median

    def to_json(self) -> str:
        """Every field and figure as indented JSON."""
        figures = {
            n: {"tokens_per_second": self.tokens_per_second(n), "over_dense": self.speedup(n)} for n in self.samples
        }
        return json.dumps({**asdict(self), "ideal": self.ideal, "figures": figures}, indent=1)


def decode_table(result: DecodeResult) -> Table:
    """Tokens per second of each way, beside the ideal."""
    lines = (
        f"{result.name}: decode at the end of a cache of {result.max_sequence} tokens, one row, ONNX Runtime, CPU",
        f"{1 - result.skipped_share:.1%} of routed blocks computed; a routed step reads "
        f"{result.routed_bytes / 2**20:.0f} of {result.dense_bytes / 2**20:.0f} MiB: ideal {result.ideal:.2f}x",
        f"caches {result.routed_cache_bytes / 2**20:.1f} of {result.dense_cache_bytes / 2**20:.1f} MiB",
    )
    table = Table(title="\n".join(lines), title_justify="left")
    for heading in ("way", "tokens/s", "over dense", "of ideal"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for name in result.samples:
        speedup = result.speedup(name)
        share = f"{speedup / result.ideal:.0%}" if name == "routed" else ""
        table.add_row(name, f"{result.tokens_per_second(name):.1f}", f"{speedup:.2f}x", share)
    return table


def set_share(model: RoutedModel, share: float, ids: Tensor, seed: int = 0, last: int | None = None) -> None:
    """Set the routers so that this share of the tokens ``ids`` ``[B, S]`` passes, block by block in one forward.

    last: count the share among so many tokens at the end (None: among all).

    A router's weight is a random direction, less as much of the stream's mean as brings the wanted share above zero.

    >>> from modpass.decode.example import tiny_decoder
    >>> set_share(tiny_decoder(True), 0.25, torch.arange(8).view(1, 8))
    """
    generator = torch.Generator().manual_seed(seed)

    def settle(router: Any, given: tuple[Tensor, ...]) -> None:
        x_ND = given[0].detach().float().flatten(0, 1)
        mean_D = x_ND.mean(0)
        along_N = x_ND @ mean_D / mean_D.dot(mean_D)
        draw_D = torch.randn(x_ND.shape[1], generator=generator) / x_ND.std(0).clamp(min=1e-6)
        level_BS = ((x_ND @ draw_D) / along_N.clamp(min=1e-3)).view(given[0].shape[:2])
        shift = level_BS[:, -(last or level_BS.shape[1]) :].flatten().quantile(1 - share)
        router.weight.copy_(draw_D - shift * mean_D / mean_D.dot(mean_D))

    hooks = [b.router.register_forward_pre_hook(settle) for b in model.routed_blocks.values()]
    try:
        with torch.no_grad():
            model.eval()(**{model.inputs[0].name: ids})
    finally:
        for hook in hooks:
            hook.remove()


def run_decode(
    source: Source,
    *,
    capacity: float = 0.125,
    every: int = 2,
    max_sequence: int = 1024,
    steps: int = 16,
    rounds: int = 7,
    warmup: int = 1,
    threads: int | None = None,
    seed: int = 0,
    tell: Tell | None = None,
) -> DecodeResult:
    """Measure decode of one row at the end of a cache of ``max_sequence`` tokens, every way in turn each round.

    The routers are set so that ``capacity`` of the tokens pass. Ways: "dense" and "routed" (our sessions),
    "concatenated" (the dense graph with its caches joined in it), "hugging-face" (where the model is one).

    Raises:
        InputError: the model does not take token ids alone.
        BlockError: it cannot be decoded.
    """
    say = tell or (lambda what, done, expected: None)
    threads = threads or torch.get_num_threads()
    if isinstance(source.model, RoutedModel):
        raise InputError("decode is measured from the dense model; give the model itself")
    say("tracing", 0, 0)
    dense = trace(source.model, source.example_inputs)
    routed = mod_transform(
        source.model, capacity, every=every, gate="unit", selection="causal", example_inputs=source.example_inputs
    )
    ids = _ids(dense, max_sequence, seed)
    for block in routed.routed_blocks.values():
        block.max_sequence = max_sequence
    set_share(routed, capacity, torch.tensor([ids]), seed, last=steps)
    with tempfile.TemporaryDirectory(prefix="modpass-decode-") as folder:
        where = Path(folder)
        prompt = max_sequence - steps
        for name, model in (("dense", dense), ("routed", routed)):
            say(f"exporting {name}", 0, 0)
            export_decoder(model, where / name, prompt=prompt, max_sequence=max_sequence)
        ways = {n: _Way(where / n, ids, prompt, threads) for n in ("dense", "routed")}
        calls: dict[str, Callable[[], Any]] = {n: w.run for n, w in ways.items()}
        joined = ConcatenatedCache(where / "dense", where / "concatenated", threads)
        calls["concatenated"] = lambda: [joined.step(t, max_sequence - 1) for t in ids[prompt:]]
        if (steps_of := hugging_face(source.model, ids[:prompt])) is not None:
            calls["hugging-face"] = lambda: steps_of(ids[prompt:])
        timings = interleave(calls, warmup, rounds, progress=lambda d, n: say("measuring", d, n))
    share = ways["routed"].statistics.skipped_share
    dense_bytes, routed_bytes = _bytes(routed, ways, share)
    return DecodeResult(
        source.name, max_sequence, steps, {n: t.samples for n, t in timings.items()}, share, dense_bytes,
        routed_bytes, ways["dense"].session.cache_bytes, ways["routed"].session.cache_bytes,
    )  # fmt: skip


def _ids(model: RoutedModel, count: int, seed: int) -> list[int]:
    example = model.inputs[0].example
    if example is None or example.is_floating_point():
        raise InputError(f"decode is measured on token ids; the first input is '{model.inputs[0].name}'")
    tables: list[Any] = [n.args[0] for n in _lookups(model) if n.args[1].target == model.inputs[0].name]  # type: ignore[union-attr]
    high = max([value_of(t).shape[0] for t in tables], default=int(example.max()) + 1)
    draws = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(2, high, (count,), generator=draws).tolist()
    return found


class _Way:
    """One of our sessions, which decodes the same tokens again from the same state."""

    def __init__(self, folder: Path, ids: list[int], prompt: int, threads: int) -> None:
        self.backend = OnnxRuntimeBackend(threads)
        self.session = DecoderSession(folder, self.backend)
        self.tokens, self.prompt = ids[prompt:], prompt
        self.backend.prefill(np.array([ids[:prompt]]), np.array([prompt]))
        for block in self.session.manifest.routing:  # room for every token that passes
            count = self.backend.arrays[block.count]
            count[:] = np.clip(count, 0, max(0, block.slots - len(self.tokens)))
        self.counts = {b.count: self.backend.arrays[b.count].copy() for b in self.session.manifest.routing}
        self.statistics = Statistics()

    def run(self) -> None:
        """Step through the tokens."""
        for name, count in self.counts.items():
            self.backend.arrays[name][:] = count
        for i, token in enumerate(self.tokens):
            self.session.step(np.array([token]), np.array([self.prompt + i]), self.statistics, np.array([True]))


def _bytes(routed: RoutedModel, ways: dict[str, _Way], skipped: float) -> tuple[float, float]:
    """Weights and caches that a dense and a routed step read."""
    seen: dict[int, int] = {p.data_ptr(): p.numel() * p.element_size() for p in routed.parameters()}
    blocks = list(routed.routed_blocks.values())
    routers = sum(b.router.weight.numel() * 4 for b in blocks)
    within = sum(p.numel() * p.element_size() for b in blocks for p in b.own())
    caches = {n: w.session.cache_bytes for n, w in ways.items()}
    own = sum(
        a.nbytes for r in ways["routed"].session.manifest.routing for c in r.caches
        for a in [ways["routed"].backend.arrays[c.name]]
    )  # fmt: skip
    dense = sum(seen.values()) - routers + caches["dense"] - _unread(routed)
    outside = sum(seen.values()) - within + caches["routed"] - own - _unread(routed)
    return float(dense), outside + (1 - skipped) * (within + own)


def _lookups(model: RoutedModel) -> list[fx.Node]:
    return [n for n in model.graph.nodes if n.op == "call_function" and name_of(n) == "embedding"]


def _unread(model: RoutedModel) -> int:
    """An embedding of which a step reads one row; one that is the head as well is read whole."""
    used = {str(n.target): n for n in model.graph.nodes if n.op == "get_attr"}
    looked = _lookups(model)
    total = 0
    for node in looked:
        table: Any = node.args[0]
        if str(table.target) in used and all(u in looked for u in table.users):
            weight = model.get_parameter(str(table.target))
            total += weight.numel() * weight.element_size()
    return total
