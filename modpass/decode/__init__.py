"""Decode: one token a row over caches, derived from the plain forward."""

from modpass.decode.model import Cache, PrefillModel, Routing, State, StepInfo, StepModel, TensorInput
from modpass.decode.prefill import prefill
from modpass.decode.step import decode_step

__all__ = [
    "Cache",
    "PrefillModel",
    "Routing",
    "State",
    "StepInfo",
    "StepModel",
    "TensorInput",
    "decode_step",
    "prefill",
]
