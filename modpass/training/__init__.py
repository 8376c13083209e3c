"""Training aids: functions for any loop."""

from modpass.training.calibration import BlockCalibration, Calibration, calibrate
from modpass.training.distill import block_outputs, dense_mode, distillation_loss, hidden_losses, routers_only
from modpass.training.huggingface import RoutingMixin, schedule_callback
from modpass.training.joint import Picked, PickStep, pick_blocks
from modpass.training.losses import RoutingLosses, routing_losses
from modpass.training.measure import block_costs, skipped
from modpass.training.schedules import Schedule, capacity_schedule, gate_schedule
from modpass.training.scores import (
    cosine_change,
    first_token_orthogonality,
    hidden_norm,
    log_change,
    loss_sensitivity,
    relative_change,
)
from modpass.training.stats import BlockStats, routing_stats, scalars

__all__ = [
    "BlockCalibration",
    "BlockStats",
    "Calibration",
    "PickStep",
    "Picked",
    "RoutingLosses",
    "RoutingMixin",
    "Schedule",
    "block_costs",
    "block_outputs",
    "calibrate",
    "capacity_schedule",
    "cosine_change",
    "dense_mode",
    "distillation_loss",
    "first_token_orthogonality",
    "gate_schedule",
    "hidden_losses",
    "hidden_norm",
    "log_change",
    "loss_sensitivity",
    "pick_blocks",
    "relative_change",
    "routers_only",
    "routing_losses",
    "routing_stats",
    "scalars",
    "schedule_callback",
    "skipped",
]
