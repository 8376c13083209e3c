"""modpass: turn any traced transformer into a Mixture-of-Depths model and lower it with fixed shapes."""

from modpass.blocks import Block, Blocks, Skipped, find_blocks
from modpass.decode import decode_step, prefill
from modpass.errors import ModpassError
from modpass.model import InputSpec, RoutedModel
from modpass.routing import RoutedBlock, Router, recorded_choices
from modpass.state import load, save_pretrained
from modpass.transform import mod_transform, trace
from modpass.version import __version__

__all__ = [
    "Block",
    "Blocks",
    "InputSpec",
    "ModpassError",
    "RoutedBlock",
    "RoutedModel",
    "Router",
    "Skipped",
    "__version__",
    "decode_step",
    "find_blocks",
    "load",
    "mod_transform",
    "prefill",
    "recorded_choices",
    "save_pretrained",
    "trace",
]
