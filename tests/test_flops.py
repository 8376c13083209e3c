"""Counted operations against a hand formula, and inputs at a fixed shape."""

from __future__ import annotations

import pytest
import torch
from bench_decoder import LAYERS, VOCABULARY, WIDTH, decoder, layer_flops

import modpass
from modpass.bench import count_flops
from modpass.bench.inputs import inputs_at, shape_of
from modpass.errors import InputError
from modpass.exporters import FixedShape


class TestFlops:
    @pytest.mark.parametrize("sequence", [16, 24])
    def test_a_dense_decoder_equals_the_hand_formula(self, sequence: int) -> None:
        model = modpass.trace(*decoder())
        names = [f"layers.{i}" for i in range(LAYERS)]
        found = count_flops(model, {"input_ids": torch.zeros(1, sequence, dtype=torch.int64)}, names)
        head = 2 * sequence * WIDTH * VOCABULARY
        assert found.total == LAYERS * layer_flops(sequence) + head
        assert found.blocks == {name: layer_flops(sequence) for name in names}
        assert found.slots == {}

    def test_a_routed_decoder_equals_the_hand_formula(self) -> None:
        model, example = decoder()
        routed = modpass.mod_transform(model, 0.25, example_inputs=example)
        inputs = {"input_ids": torch.zeros(1, 16, dtype=torch.int64)}
        found = count_flops(routed, inputs, routed.routed_blocks)
        head = 2 * 16 * WIDTH * VOCABULARY
        assert found.total == 2 * layer_flops(16) + 2 * layer_flops(4) + head
        assert found.blocks == {"layers.1": layer_flops(4), "layers.3": layer_flops(4)}
        assert found.slots == {"layers.1": 4, "layers.3": 4}

    def test_the_batch_counts(self) -> None:
        model = modpass.trace(*decoder())
        one, two = (count_flops(model, {"input_ids": torch.zeros(b, 8, dtype=torch.int64)}) for b in (1, 2))
        assert two.total == 2 * one.total


class TestInputs:
    def spec(self, *dims: int | str) -> modpass.InputSpec:
        return modpass.InputSpec("x", dims, torch.int64, torch.arange(6).view(2, 3))

    def test_values_of_the_example_are_repeated_or_cut(self) -> None:
        found = inputs_at([self.spec("batch", "sequence")], FixedShape(batch=1, sequence=5))
        assert found["x"].tolist() == [[0, 1, 2, 0, 1]]

    def test_a_dim_without_a_size_is_the_batch_if_first_else_as_in_the_example(self) -> None:
        found = inputs_at([self.spec("x.0", "x.1")], FixedShape(batch=4, sequence=None))
        assert found["x"].shape == (4, 3)

    def test_the_shape_is_read_back_in_the_terms_of_the_model(self) -> None:
        specs = [self.spec("batch", "sequence")]
        shape = FixedShape(batch=3, sequence=7)
        assert shape_of(specs, inputs_at(specs, shape)) == shape

    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            (FixedShape(batch=1, sequence=None), "give a sequence"),
            (FixedShape(batch=1, sequence=4, dims={"y.1": 2}), r"no input has a dim 'y\.1'; there are:"),
        ],
    )
    def test_a_shape_that_does_not_fit_is_refused(self, shape: FixedShape, message: str) -> None:
        with pytest.raises(InputError, match=message):
            inputs_at([self.spec("batch", "sequence")], shape)

    def test_a_sequence_is_refused_where_the_inputs_fix_it(self) -> None:
        with pytest.raises(InputError, match="its inputs fix the sequence: give none"):
            inputs_at([self.spec("batch", 3)], FixedShape(batch=1, sequence=4))
