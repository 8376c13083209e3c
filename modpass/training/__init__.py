"""Training aids: functions for any loop."""

from modpass.training.losses import RoutingLosses, routing_losses
from modpass.training.stats import BlockStats, routing_stats, scalars

__all__ = ["BlockStats", "RoutingLosses", "routing_losses", "routing_stats", "scalars"]
