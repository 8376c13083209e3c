"""The router and the routed block (Mixture-of-Depths, arXiv 2404.02258).

Shapes: B batch, S sequence, k chosen tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx, nn

from modpass.errors import InputError
from modpass.functional import (
    Gather,
    check_capacity,
    gather_tokens,
    rank_scores,
    router_scores,
    select,
    slots,
    take,
    write_back,
)

__all__ = ["Gate", "RoutedBlock", "Router", "Selection", "choose_option", "recorded_choices"]

Gate = Literal["linear", "sigmoid", "unit"]
Selection = Literal["expert_choice", "stochastic"]

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


class Router(nn.Module):
    """Scores tokens by a linear projection of the stream, always in float32 (paper section 3.4)."""

    def __init__(self, width: int, device: torch.device | None = None) -> None:
        super().__init__()
        bound = width**-0.5
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32, device=device).uniform_(-bound, bound))

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Scores ``[B, S]`` of the stream ``[B, S, D]``."""
        return router_scores(x_BSD, self.weight)

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        """Follow device moves, but stay float32 when the model is cast."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.weight.is_floating_point() and self.weight.dtype != torch.float32:
            self.weight.data = self.weight.data.float()
        return self


class RoutedBlock(nn.Module):
    """A residual block that runs on k of its S tokens (paper equation 1).

    The chosen tokens become ``x + r * (block(x) - x)``; the others pass unchanged. The block's parameters stay
    where the dense model has them, so their names are the same. Where the model has several streams side by side,
    the graph around the block permutes them by ``order`` and flattens them into one.
    """

    order: tuple[int, ...] | None = None

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
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.name, self.width, self.seq_dim = name, width, seq_dim
        self.capacity = check_capacity(capacity, f"block '{name}'")
        self.gate = choose_option("gate", gate, Gate)
        self.selection = choose_option("selection", selection, Selection)
        self.gathers, self.owned = tuple(gathers), tuple(owned)
        self.generator: torch.Generator | None = None
        self.body = body
        self.router = Router(width, device)

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
        """The number of tokens that go through at this sequence length."""
        return slots(self.capacity, sequence)

    def forward(self, x: Tensor, keep_BS: Tensor | None, *sides: Any) -> Tensor:
        """Run the block on the chosen tokens of the stream ``[B, S, D]`` (or ``[S, B, D]``)."""
        x_BSD = x if self.seq_dim == 1 else x.transpose(0, 1)
        scores_BS = self.router(x_BSD)
        index_Bk = self.choose(scores_BS, keep_BS)
        x_BkD = gather_tokens(x_BSD, index_Bk)
        y_BkD = self._run(x_BkD, index_Bk, sides)
        out = write_back(x_BSD, self.combine(x_BkD, y_BkD, gather_tokens(scores_BS, index_Bk)), index_Bk)
        return out if self.seq_dim == 1 else out.transpose(0, 1)

    def choose(self, scores_BS: Tensor, keep_BS: Tensor | None) -> Tensor:
        """The chosen positions ``[B, k]``, ascending."""
        ranked = scores_BS.detach()
        if self.selection == "stochastic":
            ranked = torch.randn(ranked.shape, generator=self.generator, device=ranked.device)
        index_Bk = select(rank_scores(ranked, keep_BS), self.slots(scores_BS.shape[1]))
        if _RECORDS:
            _RECORDS[-1][self.name] = index_Bk
        return index_Bk

    def _run(self, x_BkD: Tensor, index_Bk: Tensor, sides: Sequence[Any]) -> Tensor:
        taken = [s if g is None else take(s, index_Bk, g) for s, g in zip(sides, self.gathers, strict=True)]
        x_k = x_BkD if self.seq_dim == 1 else x_BkD.transpose(0, 1)
        y_k: Tensor = self.body(x_k, *taken, *(_member(self, path) for path in self.owned))
        return y_k if self.seq_dim == 1 else y_k.transpose(0, 1)

    def combine(self, x_BkD: Tensor, y_BkD: Tensor, scores_Bk: Tensor) -> Tensor:
        """``x + r * f(x)`` with ``f(x) = y - x``, in float32; the unit gate is ``y`` itself, exactly."""
        if self.gate == "unit":
            return y_BkD
        r_Bk1 = (scores_Bk if self.gate == "linear" else scores_Bk.sigmoid()).unsqueeze(-1)
        x = x_BkD.float()
        return (x + r_Bk1 * (y_BkD.float() - x)).to(x_BkD.dtype)

    def extra_repr(self) -> str:
        """Show the settings in ``print(model)``."""
        return f"{self.name}, capacity={self.capacity}, gate={self.gate}, selection={self.selection}"


def _member(module: Any, path: str) -> Any:
    """A parameter or buffer by path, past any attribute of the same name."""
    *parents, leaf = path.split(".")
    for part in parents:
        module = module._modules[part]
    return module._parameters[leaf] if leaf in module._parameters else getattr(module, leaf)
