"""Inputs, buffers and modules of a model that are called like something that decode adds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import modpass
from modpass.decode import decode_step, prefill
from modpass.decode.example import Block
from modpass.errors import InputError


class Named(nn.Module):
    """The tiny decoder with a table of places, an input called ``name`` and a member called ``member``."""

    def __init__(self, name: str, member: str | None = None) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, 8), nn.ModuleList(Block() for _ in range(2))
        self.place, self.member = nn.Embedding(16, 8), member
        if member is not None:
            self.register_buffer(member, torch.full((8,), 3.0))
        scope: dict[str, object] = {}
        exec(f"def forward(self, {name}): return self.run({name})", scope)
        self.forward = scope["forward"].__get__(self)  # type: ignore[attr-defined]

    def run(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        x = x if self.member is None else x * getattr(self, self.member)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.T


IDS = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "member"),
    [
        ("cache_0", None), ("table_0", None), ("blocks_1_count", None), ("x", None), ("slot", None),
        ("ids", "table_0"), ("ids", "step_0"), ("ids", "prefill_0"), ("ids", "ones_0"), ("ids", "position"),
    ],
)  # fmt: skip
def test_a_model_may_call_its_inputs_and_members_as_decode_does(name: str, member: str | None) -> None:
    model = Named(name, member).eval()
    routed = modpass.mod_transform(model, 0.5, selection="causal", example_inputs=(IDS[:, :5],))
    for block in routed.routed_blocks.values():
        block.max_sequence = 8
    first = prefill(routed, batch=2, sequence=3, max_sequence=8)
    step = decode_step(routed, batch=2, max_sequence=8)
    with torch.no_grad():
        wanted = routed(IDS)
        outputs, state = first.fill({name: IDS[:, :3]})
        found = [outputs["output"]]
        for t in range(3, 8):
            found.append(step.advance({name: IDS[:, t : t + 1]}, torch.full((2,), t), state)["output"])
    assert float((torch.cat(found, 1) - wanted[:, 2:]).abs().max()) < 1e-5


@pytest.mark.parametrize("name", ["position", "length", "live"])
def test_an_input_named_as_one_of_decode_is_refused(name: str) -> None:
    model = modpass.trace(Named(name).eval(), (IDS[:, :5],))
    with pytest.raises(InputError, match=f"an input called '{name}', a name that decode needs; trace it under another"):
        decode_step(model, batch=1, max_sequence=8)
