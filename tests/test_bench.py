"""A whole case, end to end on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench_decoder import LAYERS, VOCABULARY, WIDTH, Counting, Decoder, decoder, layer_flops
from torch import Tensor, nn

import modpass
from modpass.bench import Case, Plan, Result, Source, markdown, run_case
from modpass.bench.onnx_runners import OnnxCpuRunner
from modpass.bench.torch_runner import TorchRunner
from modpass.bench.variants import make_variants
from modpass.errors import InputError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "batch is 0; it must be at least 1"),
        ({"dtype": "int8"}, "dtype is 'int8'; it may be float32, float16, bfloat16"),
        ({"dims": {"y.1": -2}}, "y.1 is -2"),
    ],
)
def test_a_case_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Case("minilm-l6", **settings)


class TestEndToEnd:
    @pytest.fixture(scope="class")
    def found(self) -> Result:
        model, example = decoder()
        return run_case(
            Case("decoder", batch=2, sequence=16, capacity=0.25, seed=3),
            [TorchRunner("torch"), OnnxCpuRunner(), Counting(reason="no NVIDIA GPU")],
            Plan(warmup=1, repeats=3),
            Source(model, example, "decoder"),
        )

    def test_torch_and_onnx_runtime_are_measured_and_the_third_keeps_its_row(self, found: Result) -> None:
        assert [(r.runner, r.status) for r in found.rows] == [
            ("torch", "measured"),
            ("onnxruntime", "measured"),
            ("counting", "skipped"),
        ], [r.reason for r in found.rows]
        for row in found.rows[:2]:
            assert row.dense is not None
            assert row.routed is not None
            assert len(row.dense.timing.samples) == len(row.routed.timing.samples) == 3
            assert min(row.dense.timing.samples + row.routed.timing.samples) > 0

    def test_the_ideal_is_that_of_the_hand_formula(self, found: Result) -> None:
        head = 2 * 2 * 16 * WIDTH * VOCABULARY
        dense = 2 * LAYERS * layer_flops(16) + head
        routed = 2 * (2 * layer_flops(16) + 2 * layer_flops(4)) + head
        assert found.ideal == dense / routed
        assert found.inputs == {"input_ids": (2, 16)}
        assert found.routed_flops.slots == {"layers.1": 4, "layers.3": 4}

    def test_it_can_be_reported_and_read_back(self, found: Result) -> None:
        assert Result.from_json(found.to_json()) == found
        assert "| counting |" in markdown(found)

    def test_the_seed_decides_the_routers_and_leaves_torchs_own_state(self) -> None:
        model, example = decoder()
        state = torch.get_rng_state()
        weights = [
            make_variants(Case("decoder", seed=seed), Source(model, example, "decoder"))
            .routed.routed_blocks["layers.1"]
            .router.weight
            for seed in (0, 0, 1)
        ]
        assert torch.equal(weights[0], weights[1])
        assert not torch.equal(weights[0], weights[2])
        assert torch.equal(state, torch.get_rng_state())

    def test_a_shape_that_the_model_cannot_run_at_is_refused_in_words(self) -> None:
        class Positions(Decoder):
            def __init__(self) -> None:
                super().__init__()
                self.positions = nn.Parameter(torch.zeros(32, WIDTH))

            def forward(self, input_ids: Tensor) -> Tensor:
                x_BSD = self.embed(input_ids) + self.positions[: input_ids.shape[1]]
                for layer in self.layers:
                    x_BSD = layer(x_BSD)
                return self.head(x_BSD)

        source = Source(Positions().eval(), {"input_ids": torch.zeros(2, 11, dtype=torch.int64)}, "short")
        with pytest.raises(InputError, match=r"input 'input_ids' has sequence 64; the trace holds for 1 to 32"):
            run_case(Case("short", sequence=64), [], source=source)

    def test_weights_of_another_dtype_than_the_case_says_are_refused(self) -> None:
        model, example = decoder()
        with pytest.raises(InputError, match="weights of 'decoder' are bfloat16, the case says float32"):
            run_case(Case("decoder"), [], source=Source(model.bfloat16(), example, "decoder"))


class TestRoutedAlready:
    def test_the_dense_baseline_is_built_again_with_the_same_weights(self) -> None:
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=64,
            tie_word_embeddings=True,
        )
        original = transformers.LlamaForCausalLM(config).eval()
        routed = modpass.mod_transform(original, 0.5, gate="unit")
        variants = make_variants(Case("own", capacity=0.125), Source(routed, None, "own"))
        inputs = {"input_ids": torch.arange(24).view(2, 12)}
        assert variants.routed is routed
        assert not variants.dense.routed_blocks
        assert torch.equal(variants.dense(**inputs).logits, modpass.trace(original)(**inputs).logits)
        assert (variants.case.capacity, variants.case.gate) == (0.5, "unit")

    def test_without_a_class_to_build_it_from_it_is_refused(self) -> None:
        model, example = decoder()
        routed = modpass.mod_transform(model, 0.5, example_inputs=example)
        with pytest.raises(InputError, match="'own' is routed already, and its dense baseline cannot"):
            make_variants(Case("own"), Source(routed, None, "own"))
