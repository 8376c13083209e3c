"""Seeds, offline mode, and the reason a GPU test is skipped."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers

transformers.logging.set_verbosity_error()
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # two workers share two cores


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine"))
