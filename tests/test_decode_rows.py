"""``batch_capacity`` with rows that are finished or were never used: they take no place from the living."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import modpass
from modpass.decode import StepModel, decode_step
from tests.decoders import LENGTH, causal, dense
from tests.zoo import tokens


def stepped(step: StepModel, ids: Tensor, live: Tensor | None, count: int = 6) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits ``[B, T, V]`` and the last state."""
    state, found = step.state(), []
    given = {} if live is None else {"live": live}
    with torch.no_grad():
        for t in range(count):
            outputs = step.advance({"ids": ids[:, t : t + 1], **given}, torch.full((len(ids),), t), state)
            found.append(next(iter(outputs.values())))
    return torch.cat(found, 1), state


@pytest.fixture
def half() -> modpass.RoutedModel:
    """Half of the rows go through: 2 of 4."""
    return causal("inner-rotary", 0.5)


@pytest.mark.parametrize("dead", [[], [0], [1, 3], [0, 1, 2], [0, 1, 2, 3]])
def test_living_rows_choose_as_if_the_dead_were_not_there(half: modpass.RoutedModel, dead: list[int]) -> None:
    """With two places and up to two living rows each lives as by itself; with more the best two of the living do."""
    ids, live = tokens(4, LENGTH), torch.ones(4, dtype=torch.bool)
    live[dead] = False
    many = decode_step(half, batch=4, max_sequence=LENGTH, padding=False, skipping="batch_capacity")
    logits, state = stepped(many, ids, live)
    counts = {n: v for n, v in state.items() if n.endswith(".count")}
    assert all(int(v[~live].sum()) == 0 for v in counts.values())
    if int(live.sum()) <= 2:
        alone = decode_step(half, batch=4, max_sequence=LENGTH, padding=False, skipping="masked")
        wanted, own = stepped(alone, ids, None)
        assert torch.allclose(logits[live], wanted[live], atol=1e-5)
        assert all(torch.equal(v[live], own[n][live]) for n, v in counts.items())
        assert dead == [0, 1, 2, 3] or any(int(v.sum()) > 0 for v in counts.values())


def test_rows_left_alive_do_push_the_others_out(half: modpass.RoutedModel) -> None:
    """So that the test above can fail."""
    ids = tokens(4, LENGTH)
    step = decode_step(half, batch=4, max_sequence=LENGTH, padding=False, skipping="batch_capacity")
    live = torch.tensor([True, True, False, False])
    counts = [torch.stack([v[:2] for n, v in stepped(step, ids, given)[1].items() if n.endswith(".count")])
              for given in (live, None)]  # fmt: skip
    assert int(counts[0].sum()) > int(counts[1].sum())


def test_padding_and_dead_rows_are_left_out_alike() -> None:
    routed, ids = causal("llama", 0.5), tokens(4, LENGTH)
    step = decode_step(routed, batch=4, max_sequence=LENGTH, skipping="batch_capacity")
    mask, live = torch.ones(4, LENGTH, dtype=torch.int64), torch.tensor([True, True, True, False])
    mask[2, :6] = 0  # of row 2 every token so far is padding
    state = step.state()
    with torch.no_grad():
        for t in range(6):
            given = {"input_ids": ids[:, t : t + 1], "attention_mask": mask, "live": live}
            step.advance(given, torch.full((4,), t), state)
    counts = [v for n, v in state.items() if n.endswith(".count")]
    assert all(int(v[2:].sum()) == 0 for v in counts)
    assert any(int(v[:2].sum()) > 0 for v in counts)


def test_other_ways_and_dense_models_take_no_such_input(half: modpass.RoutedModel) -> None:
    for skipping, takes in (("batch_capacity", True), ("masked", False), ("conditional", False)):
        step = decode_step(half, batch=2, max_sequence=8, padding=False, skipping=skipping)  # type: ignore[arg-type]
        assert ("live" in step.input_names) is takes
    plain = decode_step(dense("inner-rotary")[1], batch=2, max_sequence=8, padding=False, skipping="batch_capacity")
    assert "live" not in plain.input_names
