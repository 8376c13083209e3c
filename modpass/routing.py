"""The router and the routed block (Mixture-of-Depths, arXiv 2404.02258).

Shapes: B batch, S sequence, k chosen tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from modpass.causal import causal_body, causal_slots
from modpass.errors import BlockError, InputError
from modpass.functional import (
    Gather,
    check_capacity,
    gather_tokens,
    rank_scores,
    select,
    slots,
    take,
    write_back,
)
from modpass.router import Predictor, Router
from modpass.sizes import Refusal

__all__ = ["Gate", "LastForward", "RoutedBlock", "Router", "Selection", "choose_option", "recorded_choices"]

Gate = Literal["linear", "sigmoid", "unit"]
Selection = Literal["expert_choice", "stochastic", "causal"]

_RECORDS: list[dict[str, Tensor]] = []  # a plain list: torch.compile can trace through it


@contextmanager
def recorded_choices() -> Iterator[dict[str, Tensor]]:
    """Collect, for every routed block that runs inside, the chosen positions ``[B, k]`` by block name.

    >>> with recorded_choices() as choices: len(choices)
    0
    """
    choices: dict[str, Tensor] = {}
    _RECORDS.append(choices)
    try:
        yield choices
    finally:
        _RECORDS.pop()


def choose_option(kind: str, value: str, allowed: Any) -> str:
    """Return ``value`` if it is one of the literal's values.

    Raises:
        InputError: it is not; names what is allowed.

    >>> choose_option("gate", "unit", Gate)
    'unit'
    """
    if value not in get_args(allowed):
        raise InputError(f"{kind} is {value!r}; it must be one of {', '.join(map(repr, get_args(allowed)))}")
    return value


@dataclass(frozen=True)
class LastForward:
    """What a routed block decided in its last forward.

    scores: the router's ``[B, S]``; logits: what decides causally, the predictor's or the same scores; index: the
    chosen positions ``[B, k]`` (S in a free slot); keep: nonzero at real tokens, or None. With gradients in
    training mode.
    """

    scores: Tensor
    logits: Tensor
    index: Tensor
    keep: Tensor | None


class RoutedBlock(nn.Module):
    """A residual block that runs on k of its S tokens (paper equation 1).

    The chosen tokens become ``x + r * (block(x) - x)``; the others pass unchanged. The block's parameters stay
    where the dense model has them, so their names are the same. Where the model has several streams side by side,
    the graph around the block permutes them by ``order`` and flattens them into one; so it does with tokens that lie in
    two dims (``token_dims``), as those of an image.
    """

    order: tuple[int, ...] | None = None
    token_dims = 1
    predictor: Predictor | None

    def __init__(
        self,
        name: str,
        body: fx.GraphModule,
        width: int,
        *,
        capacity: float,
        gate: str,
        selection: str,
        gathers: Sequence[Gather | None],
        owned: Sequence[str],
        seq_dim: int,
        predictor: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.name, self.width, self.seq_dim = name, width, seq_dim
        self.capacity = check_capacity(capacity, f"block '{name}'")
        self.gate = choose_option("gate", gate, Gate)
        self.gathers, self.owned = tuple(gathers), tuple(owned)
        self.generator: torch.Generator | None = None
        self.max_sequence: int | None = None
        self.body = body
        self.router = Router(width, device)
        self.register_module("predictor", Predictor(width, device) if predictor else None)
        self.checkpoint = False  # run the body again in the backward pass instead of keeping what it computed
        self.gate_mix = 1.0  # how much the gate counts: at 0 every weight is 1, as with the unit gate
        self.last: LastForward | None = None
        self.selection = selection

    @property
    def selection(self) -> str:
        """How tokens are chosen; may be set to another of "expert_choice", "stochastic" and "causal"."""
        return self.training_selection if self.training else self.eval_selection or self.training_selection

    @selection.setter
    def selection(self, value: str) -> None:
        self.training_selection = choose_option("selection", value, Selection)
        self.eval_selection: str | None = None
        if value == "causal":
            self.ready_causal()

    def ready_causal(self) -> None:
        """Make the form of the body that causal selection runs.

        Raises:
            BlockError: its attention cannot be followed.
        """
        if "causal_body" not in self._modules:
            try:
                self.causal_body = causal_body(self.body, self.seq_dim).train(self.training)
            except Refusal as e:
                raise BlockError(f"block '{self.name}' cannot select causally: {e}") from e

    def adopt(self, holder: nn.Module) -> None:
        """Take over the dense block's parameters, buffers and submodules under their own names."""
        pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (self._parameters, holder._parameters),
            (self._buffers, holder._buffers),
            (self._modules, holder._modules),
        ]
        for mine, theirs in pairs:
            for name, value in theirs.items():
                if name in self._modules or name in self.__dict__:
                    raise InputError(f"block '{self.name}' has a member called '{name}', a name that routing needs")
                mine[name] = value
        self._non_persistent_buffers_set |= holder._non_persistent_buffers_set

    def slots(self, sequence: int) -> int:
        """The number of tokens that go through at this sequence length.

        Causal selection may count on a longer sequence to come (``max_sequence``), of which this is the beginning.
        """
        if self.selection == "causal" and self.max_sequence is not None:
            return min(slots(self.capacity, self.max_sequence), sequence)
        return slots(self.capacity, sequence)

    def forward(self, x: Tensor, keep_BS: Tensor | None, *sides: Any) -> Tensor:
        """Run the block on the chosen tokens of the stream ``[B, S, D]`` (or ``[S, B, D]``)."""
        x_BSD = x if self.seq_dim == 1 else x.transpose(0, 1)
        scores_BS = self.router(x_BSD)
        logits_BS = self.logits(x_BSD, scores_BS)
        index_Bk = self.choose(scores_BS, keep_BS, logits_BS)
        self._record(scores_BS, logits_BS, index_Bk, keep_BS)
        if self.selection == "causal":
            out = self._causal(x_BSD, scores_BS, index_Bk, sides)
        elif self._takes_all():
            out = self.combine(x_BSD, self._run(self.body, x_BSD, None, sides), scores_BS)
        else:
            x_BkD = gather_tokens(x_BSD, index_Bk)
            y_BkD = self._run(self.body, x_BkD, index_Bk, sides)
            out = write_back(x_BSD, self.combine(x_BkD, y_BkD, gather_tokens(scores_BS, index_Bk)), index_Bk)
        return out if self.seq_dim == 1 else out.transpose(0, 1)

    def logits(self, x_BSD: Tensor, scores_BS: Tensor) -> Tensor:
        """What decides causally ``[B, S]``: the predictor where there is one, else the router's scores."""
        unused = torch.compiler.is_exporting() and self.selection != "causal"
        if self.predictor is None or unused:
            return scores_BS
        found: Tensor = self.predictor(x_BSD)
        return found

    def _record(self, scores: Tensor, logits: Tensor, index: Tensor, keep: Tensor | None) -> None:
        if torch.compiler.is_exporting():
            return
        if not self.training:  # a graph that nobody goes back through would keep the model's activations
            scores, logits = scores.detach(), logits.detach()
        self.last = LastForward(scores, logits, index, keep)

    def choose(self, scores_BS: Tensor, keep_BS: Tensor | None, logits_BS: Tensor | None = None) -> Tensor:
        """The chosen positions ``[B, k]``, ascending; with causal selection a slot that stays free holds S."""
        ranked, k = scores_BS.detach(), self.slots(scores_BS.shape[1])
        if self._takes_all() and self.selection != "causal":
            index_Bk = torch.arange(k, device=ranked.device).expand(ranked.shape[0], k)
        elif self.selection == "causal":
            deciding = ranked if logits_BS is None else logits_BS.detach()
            index_Bk = causal_slots(self.passes(deciding, keep_BS), k)
        else:
            if self.selection == "stochastic":
                ranked = torch.randn(ranked.shape, generator=self.generator, device=ranked.device)
            index_Bk = select(rank_scores(ranked, keep_BS), k)
        if _RECORDS:
            _RECORDS[-1][self.name] = index_Bk
        return index_Bk

    def _takes_all(self) -> bool:
        """Whether an exported graph has nothing to choose, gather or write back, for every token is taken."""
        return self.capacity == 1.0 and torch.compiler.is_exporting()

    def passes(self, logits_BS: Tensor, keep_BS: Tensor | None) -> Tensor:
        """Which tokens go through by themselves: those whose logit says more than one half, and are no padding."""
        passes_BS = logits_BS > 0
        return passes_BS if keep_BS is None else passes_BS & (keep_BS != 0)

    def _causal(self, x_BSD: Tensor, scores_BS: Tensor, index_Bk: Tensor, sides: Sequence[Any]) -> Tensor:
        """As ``forward``; slots that stay free compute on the last token, are seen by none and write nothing."""
        S = x_BSD.shape[1]
        safe_Bk = index_Bk.clamp(max=S - 1)
        x_BkD = gather_tokens(x_BSD, safe_Bk)
        y_BkD = self._run(self.causal_body, x_BkD, safe_Bk, sides, index_Bk < S)
        update_BkD = self.combine(x_BkD, y_BkD, gather_tokens(scores_BS, safe_Bk))
        return write_back(F.pad(x_BSD, (0, 0, 0, 1)), update_BkD, index_Bk)[:, :S]

    def _run(
        self, body: nn.Module, x_BkD: Tensor, index_Bk: Tensor | None, sides: Sequence[Any], *used: Tensor
    ) -> Tensor:
        """The body on the chosen tokens; checkpointed, it is the choice that is kept and never made again.

        index_Bk: None where every token is taken, in order.
        """
        if self.checkpoint and torch.is_grad_enabled() and not torch.compiler.is_exporting():
            again: Tensor = checkpoint(self._body, body, x_BkD, index_Bk, sides, *used, use_reentrant=False)
            return again
        return self._body(body, x_BkD, index_Bk, sides, *used)

    def _body(
        self, body: nn.Module, x_BkD: Tensor, index_Bk: Tensor | None, sides: Sequence[Any], *used: Tensor
    ) -> Tensor:
        pairs = zip(sides, self.gathers, strict=True)
        taken = [s if g is None or index_Bk is None else take(s, index_Bk, g) for s, g in pairs]
        x_k = x_BkD if self.seq_dim == 1 else x_BkD.transpose(0, 1)
        y_k: Tensor = body(x_k, *taken, *self.own(), *used)
        return y_k if self.seq_dim == 1 else y_k.transpose(0, 1)

    def own(self) -> list[Tensor]:
        """The block's own parameters and buffers, in the order in which its body takes them."""
        return [_member(self, path) for path in self.owned]

    def combine(self, x_BkD: Tensor, y_BkD: Tensor, scores_Bk: Tensor) -> Tensor:
        """``x + r * f(x)`` with ``f(x) = y - x``, in float32; the unit gate is ``y`` itself, exactly."""
        if self.gate == "unit":
            return y_BkD
        r_Bk1 = (scores_Bk if self.gate == "linear" else scores_Bk.sigmoid()).unsqueeze(-1)
        if self.gate_mix != 1.0:
            r_Bk1 = 1.0 + self.gate_mix * (r_Bk1 - 1.0)
        x = x_BkD.float()
        return (x + r_Bk1 * (y_BkD.float() - x)).to(x_BkD.dtype)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: not the last forward, whose tensors belong to a graph."""
        return {**self.__dict__, "last": None}

    def extra_repr(self) -> str:
        """Show the settings in ``print(model)``."""
        return f"{self.name}, capacity={self.capacity}, gate={self.gate}, selection={self.selection}"


def _member(module: Any, path: str) -> Any:
    """A parameter or buffer by path, past any attribute of the same name."""
    *parents, leaf = path.split(".")
    for part in parents:
        module = module._modules[part]
    return module._parameters[leaf] if leaf in module._parameters else getattr(module, leaf)
