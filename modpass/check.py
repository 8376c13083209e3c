"""Prove by values that a block keeps its tokens apart: run it on other token sets, and compare.

Two rules hold for a block whose tokens meet in attention alone. Permuted: its tokens in another order give the same
outputs in that order. Shortened: some of its tokens give what all of them give where attention cannot see the rest.
Both are run with the very body and gathers that routing uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from modpass.analysis import Analysis
from modpass.functional import gather_tokens, take
from modpass.rewrite import outline
from modpass.sizes import SEQUENCE, Refusal
from modpass.symbols import shape_of, value_of
from modpass.unseen import UnseenRunner

__all__ = ["check_block", "needed_values"]

ROUNDS = 2
CHANGE = 1e-3  # largest difference, as a share of what the block adds to the stream
PERMUTED = "when its tokens come in another order"
SHORTENED = "when the others, which attention does not see, are left out"

Values = Mapping[fx.Node, Any]


def needed_values(analysis: Analysis) -> set[fx.Node]:
    """The nodes whose values ``check_block`` takes: the stream, and what enters the block beside it."""
    inner = set(analysis.tokens)
    return {analysis.stream} | {a for n in analysis.tokens for a in n.all_input_nodes if a not in inner}


def check_block(name: str, analysis: Analysis, values: Values) -> None:
    """Run the block ``name`` permuted and shortened, on the values of ``needed_values``.

    Raises:
        Refusal: tokens meet outside attention, by how much and where; or it cannot be told.

    >>> from modpass.blocks import find_blocks
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    >>> find_blocks(encoder, (torch.randn(2, 5, 8),), check=True).names()
    ['layers.0']
    """
    check = _Check(name, analysis, values)
    B, S = check.x_BSD.shape[:2]
    if S < 2:
        raise Refusal("it cannot be checked: the example inputs have one token; give a sequence of 2 or more")
    for _ in range(ROUNDS):
        order_BS = torch.rand(B, S, generator=check.generator).argsort(1).to(check.x_BSD.device)
        check.permuted(order_BS)
        check.shortened(order_BS[:, : (S + 1) // 2].sort(1).values)


class _Check:
    def __init__(self, name: str, analysis: Analysis, values: Values) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.analysis, self.body = analysis, outline(name, analysis)
        self.x_BSD = self._stream(values[analysis.stream])
        self.sides = [self._lively(values[s.node]) for s in self.body.sides]
        attributes = {str(n.target): v for n, v in values.items() if n.op == "get_attr"}
        self.owned = [self._lively(attributes[f"{name}.{path}"]) for path in self.body.owned]

    def permuted(self, order_BS: Tensor) -> None:
        """Compare the tokens in another order with the same outputs in that order."""
        self._compare(self._run(order_BS), self._run(self._all()), order_BS, f"its output changes by {{}} {PERMUTED}")

    def shortened(self, kept_Bk: Tensor) -> None:
        """Compare some tokens alone with all of them, of which attention sees these."""
        whole_BS = self._all()
        seen_BS = torch.zeros_like(whole_BS, dtype=torch.bool).scatter(1, kept_Bk, True)
        message = f"its output at {kept_Bk.shape[1]} of {whole_BS.shape[1]} tokens changes by {{}} {SHORTENED}"
        self._compare(self._run(kept_Bk), self._run(whole_BS, seen_BS), kept_Bk, message)

    def _stream(self, value: Tensor) -> Tensor:
        """The stream ``[B, S, D]`` with noise: tokens that are alike would hide that they meet."""
        x_BSD = value if self.analysis.seq_dim == 1 else value.transpose(0, 1)
        spread = float(x_BSD.float().std().nan_to_num()) or 1.0
        return x_BSD + 0.5 * spread * self._noise(x_BSD)

    def _lively(self, value: Any) -> Any:
        """A weight or side input with noise where it is the same everywhere: a gate of zeros hides its branch."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return value
        single = value.numel() == 1 and not isinstance(value, nn.Parameter)
        return value if single or value.min() != value.max() else value + 0.1 * self._noise(value)

    def _noise(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator).to(like.device, like.dtype)

    def _all(self) -> Tensor:
        B, S = self.x_BSD.shape[:2]
        return torch.arange(S, device=self.x_BSD.device).expand(B, S)

    def _run(self, index_Bk: Tensor, seen_BS: Tensor | None = None) -> Values:
        x_BkD = gather_tokens(self.x_BSD, index_Bk)
        pairs = zip(self.body.sides, self.sides, strict=True)
        sides = [v if s.gather is None else take(v, index_Bk, s.gather) for s, v in pairs]
        runner = UnseenRunner(self.body.graph_module, self.analysis.sizes, index_Bk, seen_BS)
        try:
            return runner.record(self._as_stream(x_BkD), *sides, *self.owned)
        except Exception as e:
            first = (str(e).strip() or type(e).__name__).splitlines()[0]
            raise Refusal(f"it cannot be checked: it does not run on {index_Bk.shape[1]} of its tokens: {first}") from e

    def _as_stream(self, x_BSD: Tensor) -> Tensor:
        return x_BSD if self.analysis.seq_dim == 1 else x_BSD.transpose(0, 1)

    def _compare(self, some: Values, whole: Values, index_Bk: Tensor, message: str) -> None:
        graph = self.body.graph_module.graph
        output: Any = next(n for n in graph.nodes if n.op == "output").args[0]
        found, wanted = self._as_stream(some[output]).double(), self._as_stream(whole[output]).double()
        wanted = gather_tokens(wanted, index_Bk)
        if not (found.isfinite().all() and wanted.isfinite().all()):
            raise Refusal("it cannot be checked: its output is not finite on the example inputs")
        change = (wanted - gather_tokens(self.x_BSD, index_Bk).double()).abs().max()
        rounding = _rounding(self.x_BSD.dtype)
        if change <= rounding * wanted.abs().max():
            raise Refusal("it cannot be checked: it adds nothing to the stream on the example inputs")
        difference = (found - wanted).abs().max()
        if difference > max(CHANGE, rounding) * change + rounding * wanted.abs().max():
            amount = f"{float(difference / change):.2g} of what it adds to the stream"
            raise Refusal(
                f"{message.format(amount)}: tokens meet outside attention{self._place(some, whole, index_Bk)}"
            )

    def _place(self, some: Values, whole: Values, index_Bk: Tensor) -> str:
        """The first operator whose values differ, among those of one row per token."""
        sizes = self.analysis.sizes
        for node in self.body.graph_module.graph.nodes:
            shape = shape_of(value_of(node)) if node.op == "call_function" else ()
            dims = [i for i, size in enumerate(shape) if sizes.carries(size)]
            if len(dims) != 1 or sizes.canonical(shape[dims[0]]) != SEQUENCE or sizes.batch not in shape:
                continue
            front = (shape.index(sizes.batch), dims[0])
            found = some[node].movedim(front, (0, 1)).double()
            wanted = gather_tokens(whole[node].movedim(front, (0, 1)), index_Bk).double()
            if (found - wanted).abs().max() > 10 * CHANGE * wanted.abs().max():
                return f", first in {node.target} (node {node.name})"
        return ""


def _rounding(dtype: torch.dtype) -> float:
    """How far two ways of summing may differ, relative to the values."""
    return (64 if dtype.itemsize > 2 else 4) * torch.finfo(dtype).eps
