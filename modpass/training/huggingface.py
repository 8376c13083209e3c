"""Training with Hugging Face's ``Trainer``: routing losses added, statistics logged, schedules stepped."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from modpass.errors import require
from modpass.training.losses import routing_losses
from modpass.training.schedules import Schedule
from modpass.training.stats import routing_stats, scalars

__all__ = ["RoutingMixin", "schedule_callback"]


class RoutingMixin:
    """Put it in front of ``Trainer`` (or a class made from it); the model is traced with its labels.

    ``routing_weights``: what ``routing_losses`` takes, such as ``{"z_loss": 1e-3}``. Save with
    ``modpass.save_pretrained`` and ``save_strategy="no"``: ``Trainer`` cannot write tied weights of a traced model.

    >>> class Plain:
    ...     def compute_loss(self, model, inputs, return_outputs=False): return model(inputs).mean(), None
    >>> class Routing(RoutingMixin, Plain): pass
    >>> from modpass.decode.example import tiny_decoder
    >>> import torch
    >>> Routing().compute_loss(tiny_decoder(True).train(), torch.zeros(1, 8, dtype=torch.int64)).shape
    torch.Size([])
    """

    routing_weights: dict[str, Any] = {}  # noqa: RUF012  # replaced, not changed

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        """The model's own loss, and in training mode what routing adds."""
        loss: Tensor
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)  # type: ignore[misc]
        if model.training:
            loss = loss + routing_losses(model, **self.routing_weights).total
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log what the last forward chose beside each loss."""
        for own, front in (("loss", "routing"), ("eval_loss", "eval_routing")):
            if own in logs:
                logs.update(scalars(routing_stats(self.model), front))  # type: ignore[attr-defined]
        super().log(logs, *args, **options)  # type: ignore[misc]


def schedule_callback(*schedules: Schedule) -> Any:
    """A ``TrainerCallback`` that steps schedules after each optimizer step.

    Raises:
        MissingExtraError: transformers is not installed.

    >>> schedule_callback().on_step_end(None, None, None)
    """
    base = require("transformers", "hf").TrainerCallback

    class StepSchedules(base):  # type: ignore[misc,valid-type]
        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            for schedule in schedules:
                schedule.step()

    return StepSchedules()
