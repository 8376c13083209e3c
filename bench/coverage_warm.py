"""Imported once by the server that every model's process forks from."""

from __future__ import annotations

import warnings

import torch

from modpass.bench import coverage_stages
from modpass.bench.offline import transformers_offline

__all__ = ["coverage_stages", "torch"]

warnings.simplefilter("ignore")
torch.set_num_threads(1)
transformers_offline("hf").logging.set_verbosity_error()
