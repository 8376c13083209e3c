"""One process of a training run, for ``torchrun``: trains ten steps and writes its losses and a checkpoint.

Arguments: how ("one", "ddp" or "fsdp"), the folder to write to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import modpass
from modpass.training import capacity_schedule, routing_losses
from tests.zoo import Decoder, TrilAttention

STEPS, ROWS, LENGTH = 10, 4, 16


def routed_model() -> modpass.RoutedModel:
    """The same in every process."""
    torch.manual_seed(0)
    model = Decoder(TrilAttention, width=32)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ids = torch.randint(2, 97, (2, 12))
    return modpass.mod_transform(model, 0.5, predictor=True, checkpoint=True, example_inputs=(ids,)).train()


def batches() -> list[Tensor]:
    """The same in every process."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 97, (ROWS, LENGTH), generator=generator) for _ in range(STEPS)]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """The model's own loss and that of its routers and predictors."""
    logits = model(ids)
    own = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return own + routing_losses(model, router=0.1, z_loss=0.01).total


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW whose eps keeps it from blowing rounding up to a whole step where a gradient is zero."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3)


def prepare(kind: str, routed: modpass.RoutedModel) -> nn.Module:
    """Wrap the model: routed blocks are units of their own, for they are called as modules."""
    if kind == "ddp":
        return DistributedDataParallel(routed)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in routed.routed_blocks.values():
            fully_shard(block, mesh=mesh)
        fully_shard(routed, mesh=mesh)
    return routed


def train(kind: str, folder: Path) -> None:
    """Train, then write ``losses-<rank>.json`` and the checkpoint."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if kind != "one" else (0, 1)
    routed = routed_model()
    schedule = capacity_schedule(routed, 1.0, 0.25, steps=STEPS, levels=4)
    model = prepare(kind, routed)
    optimizer = optimizer_of(model)
    losses = []
    for ids in batches():
        loss = loss_of(model, ids.chunk(world)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / world)
    (folder / f"losses-{rank}.json").write_text(json.dumps(losses))
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "schedule": schedule.state_dict()}
    if kind == "one":
        torch.save(weights, folder / "weights.pt")
    else:
        dcp.save(state, checkpoint_id=folder / "checkpoint")


if __name__ == "__main__":
    torch.set_num_threads(1)
    way, target = sys.argv[1], Path(sys.argv[2])
    if way != "one":
        dist.init_process_group("gloo")
    train(way, target)
    if way != "one":
        dist.destroy_process_group()
