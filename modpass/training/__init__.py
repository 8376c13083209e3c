"""Training aids: functions for any loop."""

from modpass.training.distill import block_outputs, dense_mode, distillation_loss, hidden_losses, routers_only
from modpass.training.losses import RoutingLosses, routing_losses
from modpass.training.schedules import Schedule, capacity_schedule, gate_schedule
from modpass.training.stats import BlockStats, routing_stats, scalars

__all__ = [
    "BlockStats",
    "RoutingLosses",
    "Schedule",
    "block_outputs",
    "capacity_schedule",
    "dense_mode",
    "distillation_loss",
    "gate_schedule",
    "hidden_losses",
    "routers_only",
    "routing_losses",
    "routing_stats",
    "scalars",
]
