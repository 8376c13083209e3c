"""The routing functions and the routed block at their edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import modpass
from modpass.errors import CapacityError, InputError
from modpass.functional import Gather, rank_scores, select, slots, take, write_back
from modpass.reference import reference_choice, routed_reference
from tests.test_transform import relative, routed_pair, set_blocks, settings_of
from tests.zoo import tokens


@pytest.mark.parametrize(("sequence", "k"), [(1024, 128), (16, 2), (12, 1), (7, 1), (1, 1), (2048, 256)])
def test_slots_follow_the_one_rule(sequence: int, k: int) -> None:
    assert slots(0.125, sequence) == k


def test_slots_do_not_lose_a_token_to_rounding() -> None:
    assert [slots(0.29, 100), slots(0.57, 100), slots(1.0, 37)] == [29, 57, 37]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(
            st.sampled_from([0.0, 1.0, -2.5, 3.0, float("nan"), float("inf"), float("-inf")]),
            min_size=7,
            max_size=7,
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 7),
    st.lists(st.booleans(), min_size=7, max_size=7),
)
def test_selection_equals_a_sort_in_plain_python(rows: list[list[float]], k: int, real: list[bool]) -> None:
    found = select(rank_scores(torch.tensor(rows), torch.tensor([real] * len(rows))), k)
    wanted = [reference_choice(row, k / 7, real) for row in rows]
    assert found.tolist() == wanted


def test_selection_has_k_distinct_ascending_positions_when_every_score_is_equal() -> None:
    assert select(torch.zeros(2, 9), 4).tolist() == [[0, 1, 2, 3]] * 2


def test_the_exported_form_of_selection_and_write_back_computes_the_same() -> None:
    class Step(torch.nn.Module):
        def forward(self, x: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
            index = select(scores, 3)
            return index, write_back(x, x[torch.arange(2)[:, None], index] * 2, index)

    x, scores = torch.randn(2, 8, 4), torch.randn(2, 8)
    exported = torch.export.export(Step(), (x, scores)).module()
    for a, b in zip(exported(x, scores), Step()(x, scores), strict=True):
        assert torch.equal(a, b)
    assert "topk" in str(exported.graph)
    assert "index_put" not in str(exported.graph)


def test_a_selection_of_more_tokens_than_there_are_is_refused() -> None:
    with pytest.raises(CapacityError, match="5 tokens asked for, but the sequence holds 3"):
        select(torch.zeros(1, 3), 5)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(2, 6), st.data())
def test_take_equals_indexing_one_row_at_a_time(B: int, S: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, S))
    index = torch.stack([torch.randperm(S)[:k].sort().values for _ in range(B)])
    mask, table, merged = torch.randn(B, 2, S, S), torch.randn(S, 5), torch.randn(B * 2, S, S)
    square = take(mask, index, Gather(4, 0, True, (2, 3)))
    line = take(table, index, Gather(4, 0, False, (2,)))
    heads = take(merged, index, Gather(3, 0, True, (1, 2), repeat=2))
    for b in range(B):
        assert torch.equal(square[b], mask[b][:, index[b]][:, :, index[b]])
        assert torch.equal(line[b, 0], table[index[b]])
        for h in range(2):
            assert torch.equal(heads[b * 2 + h], merged[b * 2 + h][index[b]][:, index[b]])


@pytest.mark.parametrize("B", [1, 5])
@pytest.mark.parametrize("sequence", [*range(1, 16), 31])
def test_short_sequences_are_right(sequence: int, B: int) -> None:
    model, routed = routed_pair("inner-rotary")
    set_blocks(routed, 0.125, "linear")
    ids = tokens(B, sequence)
    with torch.no_grad():
        found = routed(ids=ids)
        with routed_reference(model, settings_of(routed)) as reference:
            assert relative(found, reference(ids=ids)) < 1e-4


def test_equal_scores_choose_the_first_tokens() -> None:
    _, routed = routed_pair("tril-buffer")
    set_blocks(routed, 0.5, "sigmoid")
    weights = {n: b.router.weight.detach().clone() for n, b in routed.routed_blocks.items()}
    with torch.no_grad(), modpass.recorded_choices() as choices:
        for block in routed.routed_blocks.values():
            block.router.weight.zero_()
        routed(ids=tokens(2, 12))
        for name, block in routed.routed_blocks.items():
            block.router.weight.copy_(weights[name])
    assert all(c.tolist() == [list(range(6))] * 2 for c in choices.values())


def test_a_token_with_a_nan_score_gets_no_slot_and_stays_visible() -> None:
    _, routed = routed_pair("encoder")
    set_blocks(routed, 0.5, "linear")
    block = next(iter(routed.routed_blocks.values()))
    x = torch.randn(2, 8, 48)
    x[0, 2] = float("nan")
    with torch.no_grad(), modpass.recorded_choices() as choices:
        out = block(x, None)
    assert 2 not in choices[block.name][0].tolist()
    assert out[0, 2].isnan().all(), "the other branch passes it on as it came"
    assert not out[0, [0, 1, 3, 4, 5, 6, 7]].isnan().any()


def test_padding_takes_no_slot_from_a_real_token() -> None:
    _, routed = routed_pair("llama")
    set_blocks(routed, 0.5, "linear")
    mask = torch.ones(3, 16, dtype=torch.int64)
    mask[1, :10] = 0
    mask[2, 4:] = 0
    with torch.no_grad(), modpass.recorded_choices() as choices:
        routed(input_ids=tokens(3, 16), attention_mask=mask)
    for index in choices.values():
        assert set(range(10, 16)) <= set(index[1].tolist()), "6 real tokens, 8 slots"
        assert set(range(4)) <= set(index[2].tolist())


def test_stochastic_selection_is_random_and_repeats_with_a_seed() -> None:
    model, _ = routed_pair("encoder")
    routed = modpass.mod_transform(model, 0.5, selection="stochastic", example_inputs=(torch.randn(2, 9, 48),))
    x = torch.randn(1, 40, 48)

    def chosen(generator: torch.Generator | None) -> list[Any]:
        routed.seed(generator)
        with torch.no_grad(), modpass.recorded_choices() as choices:
            routed(x)
        return [c.tolist() for c in choices.values()]

    first = chosen(torch.Generator().manual_seed(3))
    assert first == chosen(torch.Generator().manual_seed(3))
    assert first != chosen(torch.Generator().manual_seed(4))


@pytest.mark.parametrize("capacity", [0.0, -0.5, 1.5, float("nan"), True, "half"])
def test_a_capacity_outside_its_range_is_refused(capacity: Any) -> None:
    with pytest.raises(InputError, match=r"must be a number in \(0, 1\]"):
        modpass.mod_transform(torch.nn.Identity(), capacity)
