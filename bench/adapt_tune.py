"""Brief tuning of a pretrained model whose blocks are routed or dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from modpass import RoutedModel
from modpass.bench.adapt_setup import Run, next_token_loss
from modpass.bench.adapt_text import Text
from modpass.training import dense_mode, distillation_loss, routers_only

__all__ = ["gated", "tune"]


@contextmanager
def gated(model: RoutedModel, names: Sequence[str], mix: float) -> Iterator[None]:
    """Inside, these blocks weigh chosen tokens by a sigmoid gate, which counts ``mix``: so routers learn."""
    blocks = [model.routed_blocks[n] for n in names]
    for block in blocks:
        block.gate, block.gate_mix = "sigmoid", mix
    try:
        yield
    finally:
        for block in blocks:
            block.gate, block.gate_mix = "unit", 1.0


def tune(
    model: RoutedModel,
    kind: str,
    run: Run,
    texts: Sequence[Text],
    teacher: RoutedModel,
    tell: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Train ``kind`` ("routers", "lora" or "distil") for ``run.steps`` on rows of every text in turn.

    Routers alone learn from the teacher as "distil" does; it is taken in dense mode. Routers of the unit gate stay.
    """
    optimizer = torch.optim.AdamW(_groups(model, kind, run), weight_decay=0.0)
    rates = [g["lr"] for g in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=run.steps + 1, pct_start=0.2)
    draws = torch.Generator().manual_seed(run.seed)
    model.train()
    for step in range(run.steps):
        tell(step, run.steps)
        ids = _batch(texts[step % len(texts)], run, draws)
        if kind == "lora":
            loss = next_token_loss(model(input_ids=ids), ids)
        else:
            with torch.no_grad(), dense_mode(teacher.eval()):
                target = teacher(input_ids=ids).logits
            loss = distillation_loss(model.train()(input_ids=ids).logits, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


def _groups(model: RoutedModel, kind: str, run: Run) -> list[dict[str, Any]]:
    routers_only(model)
    groups = [{"params": [b.router.weight for b in model.routed_blocks.values() if b.gate != "unit"], "lr": run.rate}]
    if kind != "routers":
        adapters = [p.requires_grad_(True) for n, p in model.named_parameters() if "lora_" in n]
        groups.append({"params": adapters, "lr": run.lora_rate})
    return [g for g in groups if g["params"]]


def _batch(text: Text, run: Run, draws: torch.Generator) -> Tensor:
    length = run.tuning_sequence
    starts = torch.randint(len(text.train) - length + 1, (run.tuning_rows,), generator=draws)
    return torch.stack([text.train[i : i + length] for i in starts])
