"""DDP and FSDP2 in two processes against one, and their checkpoints loaded by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from modpass.training import capacity_schedule
from tests.distributed_worker import batches, loss_of, optimizer_of, routed_model, train

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process over whole batches."""
    folder = tmp_path_factory.mktemp("one")
    train("one", folder)
    return folder


def two_processes(kind: str, folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [*command, "-m", "tests.distributed_worker", kind, str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_as_one_and_their_checkpoint_loads_in_one(kind: str, one: Path, tmp_path: Path) -> None:
    two_processes(kind, tmp_path)
    wanted = json.loads((one / "losses-0.json").read_text())
    for rank in (0, 1):
        found = json.loads((tmp_path / f"losses-{rank}.json").read_text())
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 1e-5
    assert wanted[-1] < wanted[0], "nothing was learned"

    model = routed_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = optimizer_of(model)
    schedule = capacity_schedule(model, 1.0, 0.5, steps=2)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "schedule": schedule.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    trained = torch.load(one / "weights.pt")
    assert set(trained) == set(model.state_dict())
    assert max(float((v - trained[n]).abs().max()) for n, v in model.state_dict().items()) < 1e-4
    assert {b.capacity for b in model.routed_blocks.values()} == {0.25}
    ids = batches()[0]
    before = loss_of(model, ids)
    before.backward()
    optimizer.step()
    assert loss_of(model, ids) < before, "the optimizer does not go on"
