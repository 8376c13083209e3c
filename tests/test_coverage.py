"""The coverage run: shrunk configurations, stages, processes that die, and the report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from modpass.bench import coverage
from modpass.bench.coverage import CoverageResult, CoverageRow, compare, render
from modpass.bench.coverage_configs import enliven, shrink, shrunk_value
from modpass.bench.coverage_decode import render_decode, run_decode_stages
from modpass.bench.coverage_inputs import inputs_for
from modpass.bench.coverage_models import FAMILIES, make_model, model_names
from modpass.bench.coverage_others import OTHERS, Other
from modpass.bench.coverage_pool import Job, run_jobs
from modpass.bench.coverage_report import by_construction
from modpass.bench.coverage_result import code_digest
from modpass.bench.coverage_stages import STAGES, run_stages
from modpass.errors import InputError, StateError

Report = Callable[[str, Any], None]


def stages_of(family: str, name: str, last: str) -> tuple[list[str], dict[str, Any], Any]:
    """The stages passed, the facts told, and the failure, in this very process."""
    events: list[tuple[str, Any]] = []
    threads = torch.get_num_threads()
    try:
        run_stages(family, name, last, lambda kind, value: events.append((kind, value)))
    finally:
        torch.set_num_threads(threads)
    passed = [value[0] for kind, value in events if kind == "done"]
    facts = dict(value for kind, value in events if kind == "fact")
    return passed, facts, next((value for kind, value in events if kind == "fail"), None)


# Models


@pytest.mark.parametrize(
    ("config", "field", "expected"),
    [
        (transformers.LlamaConfig, "num_hidden_layers", 4),
        (transformers.GPT2Config, "n_embd", 64),
        (transformers.MistralConfig, "num_key_value_heads", 2),
        (transformers.BertConfig, "vocab_size", 128),
        (transformers.MixtralConfig, "num_local_experts", 4),
        (transformers.ViTConfig, "image_size", 64),
        (transformers.T5Config, "num_decoder_layers", 4),
    ],
)
def test_a_configuration_shrinks_by_what_its_fields_count(config: Any, field: str, expected: int) -> None:
    assert getattr(shrink(config), field) == expected


def test_no_size_grows() -> None:
    assert shrunk_value("num_hidden_layers", 2) == 2
    assert shrunk_value("type_vocab_size", 2) == 2


def test_special_tokens_stay_inside_the_shrunk_vocabulary() -> None:
    config = shrink(transformers.Qwen2VLConfig)
    assert config.image_token_id < config.text_config.vocab_size


def test_a_layer_of_each_kind_is_kept() -> None:
    config = shrink(transformers.Gemma3TextConfig)
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert len(config.layer_types) == config.num_hidden_layers == 4


def test_key_heads_stay_as_many_as_query_heads_where_they_were() -> None:
    config = shrink(transformers.LlamaConfig)
    assert config.num_key_value_heads == config.num_attention_heads


def test_slow_layers_are_kept_once_and_layers_told_by_number_are_there() -> None:
    config = shrink(transformers.Qwen3NextConfig)
    assert list(config.layer_types) == ["linear_attention", *["full_attention"] * 3]
    assert max(shrink(transformers.models.mllama.MllamaVisionConfig).intermediate_layers_indices) == 3


def test_a_backbone_of_another_package_gives_way_to_transformers_own() -> None:
    config = shrink(transformers.DetrConfig)
    assert (config.backbone_config.model_type, config.backbone_config.out_features) == ("resnet", ["stage4"])


def test_parts_of_a_configuration_whose_own_defaults_do_not_fit_are_shrunk_too() -> None:
    assert shrink(transformers.models.gemma4_assistant.Gemma4AssistantConfig).text_config.hidden_size == 64


def test_enlivened_weights_repeat_and_leave_no_block_without_effect() -> None:
    a, b = enliven(nn.Linear(8, 8)), enliven(nn.Linear(8, 8))
    assert torch.equal(a.weight, b.weight)  # type: ignore[arg-type]
    scale = nn.Module()
    scale.gamma = nn.Parameter(torch.full((8,), 1e-5))
    enliven(scale)
    assert scale.gamma.abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_models_under_unique_names(family: str) -> None:
    names = model_names(family)
    assert names
    assert all(isinstance(kind, str) and kind for kind in names.values())


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(InputError, match="there is no family 'fish'; there are: causal-lm, encoder, image"):
        model_names("fish")


def test_a_model_is_the_same_each_time() -> None:
    one, two = (make_model("encoder", "bert").model.state_dict() for _ in range(2))
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_inputs_that_the_configuration_does_not_tell_are_found_by_trying_layouts() -> None:
    assert inputs_for(make_model("encoder-decoder", "whisper").model) is None
    named = inputs_for(make_model("image", "siglip2").model)
    assert named is not None
    assert set(named) == {"pixel_values", "spatial_shapes", "pixel_attention_mask"}


@pytest.mark.parametrize(
    ("family", "name", "shapes"),
    [
        ("image", "vit_mae", {"pixel_values": (2, 3, 64, 64), "noise": (2, 16)}),
        ("encoder-decoder", "voxtral_realtime", {"input_features": (2, 128, 64), "input_ids": (2, 8)}),
        ("encoder-decoder", "kyutai_speech_to_text", {"input_ids": (2, 37, 33)}),
    ],
)
def test_noise_sound_beside_text_and_codebooks_are_fed(family: str, name: str, shapes: dict[str, Any]) -> None:
    named = inputs_for(make_model(family, name).model)
    assert named is not None
    assert {n: tuple(v.shape) for n, v in named.items()} == shapes


# Stages


def test_a_decoder_passes_up_to_onnxruntime() -> None:
    passed, facts, failure = stages_of("causal-lm", "gpt2", "onnxruntime")
    assert failure is None
    assert passed == list(STAGES[: STAGES.index("onnxruntime") + 1])
    assert facts == {"attends": True, "inferred": True, "blocks": 4, "skipped": []}


def test_a_convolutional_net_is_refused_with_the_reason() -> None:
    passed, facts, failure = stages_of("image", "mobilenet_v1", "reference")
    assert passed[:2] == ["make", "run"]
    assert facts["attends"] is False
    assert failure == ("blocks", "refused", "no attention in it")


class Noisy(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input + torch.randn(input.shape))


def test_a_model_that_draws_noise_cannot_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    noisy = Other("Noisy", lambda: (Noisy(8, 8), {"input": torch.randn(2, 8)}, None))
    monkeypatch.setitem(OTHERS, "noisy", noisy)
    passed, _, failure = stages_of("other", "noisy", "reference")
    assert passed == ["make"]
    assert failure[:2] == ("run", "failed")
    assert "two runs differ" in failure[2]


def test_attention_in_a_fused_layer_counts() -> None:
    _, facts, failure = stages_of("other", "torch-encoder", "run")
    assert failure is None
    assert facts["attends"] is True


def test_a_package_that_is_not_installed_is_told() -> None:
    _, _, failure = stages_of("image", "timm_wrapper", "reference")
    assert failure[:2] == ("make", "not installed")
    assert "timm" in failure[2]


def test_a_model_that_computes_something_else_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from modpass.routing import RoutedBlock

    monkeypatch.setattr(RoutedBlock, "combine", lambda self, x, y, scores: x)
    passed, _, failure = stages_of("other", "torch-encoder", "reference")
    assert passed == ["make", "run", "trace", "blocks"]
    assert failure[:2] == ("unit", "wrong")
    assert failure[2].startswith("output 0 is off from the dense model by")


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("llama", ()),
        ("bert", ()),
        ("roberta", ()),
        ("xlnet", ("decode", "refused", "aten.reshape.default takes tokens apart")),
    ],
)
def test_decode_goes_step_by_step_or_says_why_not(name: str, failure: tuple[str, ...]) -> None:
    events: list[tuple[str, Any]] = []
    threads = torch.get_num_threads()
    try:
        run_decode_stages(name, lambda kind, value: events.append((kind, value)))
    finally:
        torch.set_num_threads(threads)
    assert [v[0] for kind, v in events if kind == "done"] == ["make", "run", "trace", *([] if failure else ["decode"])]
    told = next((v for kind, v in events if kind == "fail"), ())
    assert all(part in text for part, text in zip(failure, told, strict=True))


def test_decode_rows_are_kept_and_rendered(tmp_path: Path) -> None:
    file, row = tmp_path / "rows.json", CoverageRow("causal-lm", "llama", "X", ("make", "run", "trace", "decode"))
    refused = CoverageRow("causal-lm", "bert", "Y", ("make", "run", "trace"), "decode", "refused", "not | causal")
    file.write_text(CoverageResult((row, refused), "decode").to_json())
    result = coverage.run_decode(["llama", "bert"], progress=False, record=file)
    text = render_decode(result)
    assert "| causal-lm | 2 | 2 | 2 | 1 |" in text
    assert "| bert | decode | refused | not \\| causal |" in text
    assert f"2 of {len(model_names('causal-lm'))} architectures were measured; not: " in text


# Processes: the works below run in a child


def fine(report: Report) -> None:
    report("start", "make")
    report("done", ("make", 0.5))
    report("fact", ("skipped", [["layers.0", "a scan"]]))


def hangs(report: Report) -> None:
    report("start", "trace")
    time.sleep(600)


def burns(report: Report) -> None:
    report("start", "unit")
    while True:
        pass


def dies(report: Report) -> None:
    report("start", "onnx")
    os.write(2, b"terminate called: what(): out of luck\n")
    os.abort()


def raises(report: Report) -> None:
    report("start", "unit")
    raise RuntimeError("a bug of the stages")


def test_a_process_that_hangs_burns_or_dies_becomes_a_row_and_the_run_goes_on() -> None:
    works = {"hangs": hangs, "burns": burns, "dies": dies, "raises": raises, "fine": fine}
    jobs = [Job(CoverageRow("other", name, "Stand-in"), work) for name, work in works.items()]
    rows = {row.name: row for row in run_jobs(jobs, 2, 5.0)}
    assert set(rows) == set(works)
    assert (rows["hangs"].outcome, rows["hangs"].failed) == ("timed out", "trace")
    assert rows["hangs"].reason.startswith("no end within")
    assert (rows["burns"].outcome, rows["burns"].failed) == ("timed out", "unit")
    assert (rows["dies"].outcome, rows["dies"].failed) == ("crashed", "onnx")
    assert "signal 6" in rows["dies"].reason
    assert "out of luck" in rows["dies"].reason
    assert (rows["raises"].outcome, rows["raises"].failed) == ("crashed", "unit")
    assert "a bug of the stages" in rows["raises"].reason
    assert rows["fine"].failed is None
    assert rows["fine"].passed == ("make",)
    assert rows["fine"].skipped == (("layers.0", "a scan"),)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(CoverageResult((CoverageRow("other", "torch-encoder", "X", ("make",)),), "make").to_json())
    result = coverage.run("other", ["torch-encoder"], last="make", progress=False, record=file)
    assert [r.kind for r in result.rows] == ["X"]
    with pytest.raises(StateError, match="holds a run up to the stage 'make', not 'unit'"):
        coverage.run("other", ["torch-encoder"], last="unit", progress=False, record=file)


def test_rows_of_an_outcome_or_of_other_code_are_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    refused = CoverageRow("other", "torch-encoder", "X", (), "make", "refused", "why", code=code_digest())
    stale = CoverageRow("other", "torch-decoder", "Y", ("make",), code="older")
    kept = CoverageRow("other", "torch-transformer", "Z", ("make",), code=code_digest())
    file.write_text(CoverageResult((refused, stale, kept), "make").to_json())
    names = ["torch-encoder", "torch-decoder", "torch-transformer"]
    result = coverage.run("other", names, last="make", progress=False, record=file, again=["refused", "stale"])
    assert [r.kind for r in result.rows] == ["TransformerEncoder", "TransformerDecoder", "Z"]
    assert all(r.outcome == "passed" and r.code == code_digest() for r in result.rows)
    assert len(CoverageResult.from_json(file.read_text()).rows) == 3


@pytest.mark.slow
def test_a_run_measures_each_model_in_its_own_process(tmp_path: Path) -> None:
    result = coverage.run(
        "other", ["torch-encoder", "torch-transformer"], last="unit", progress=False, record=tmp_path / "rows.json"
    )
    assert CoverageResult.from_json((tmp_path / "rows.json").read_text()).rows
    assert [r.name for r in result.rows] == ["torch-encoder", "torch-transformer"]
    assert all(r.failed is None and r.reached("unit") and r.blocks for r in result.rows)
    assert "torch" in result.versions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": ["lama"]}, "there is no architecture 'lama' in causal-lm"),
        ({"last": "moon"}, "there is no stage 'moon'; there are: make, run, trace"),
        ({"again": ["bad"]}, "there is no outcome 'bad'; there are: passed, refused, failed"),
        ({"jobs": 0}, "jobs is 0 and timeout_s 300; both must be positive"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_runs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        coverage.run("causal-lm", **options)


# Report

ROUTED = CoverageRow("causal-lm", "a", "A", STAGES, attends=True, blocks=4, seconds={"make": 0.1})
HALF = CoverageRow(
    "causal-lm", "b", "B", STAGES[:5], "reference", "wrong", "off by 0.3 | more", True, True, 3, (("l.0", "a scan"),)
)
CONVOLVES = CoverageRow("causal-lm", "c", "C", STAGES[:3], "blocks", "refused", "no attention in it", False)
RESULT = CoverageResult((ROUTED, HALF, CONVOLVES), versions={"torch": "2.0"})


def test_the_report_counts_stages_and_gives_each_model_its_reason() -> None:
    text = render(RESULT)
    assert "| causal-lm | 3 | 3 | 3 | 2 | 2 | 1 | 1 | 1 | 1 |" in text
    assert "| b | B | 3 of 4 | reference | wrong | off by 0.3 \\| more |" in text
    assert "| c | C | – | blocks | refused | no attention in it |" in text
    assert "torch 2.0" in text


def test_the_report_gives_each_figure_with_and_without_what_has_nothing_to_route() -> None:
    text = render(RESULT)
    assert "| causal-lm | 3 | 1 of 3 (33.3%) | 1 of 2 (50.0%) | 1 of 1 (100.0%) | 1 | 0 |" in text
    assert "- Left out of (b) in causal-lm: no attention (1): c." in text
    some = render(replace(RESULT, registered={"causal-lm": ["a", "b", "c", "d"]}))
    assert "| causal-lm | 3 of 4 | 1 of 3 (33.3%) |" in some
    assert (
        "- **Not measured** in causal-lm (1): d; if each of them traced and failed, (a) would be 1 of 4 (25.0%)."
        in some
    )


@pytest.mark.parametrize(
    ("skipped", "expected"),
    [
        (["aten.conv1d.default convolves over tokens (kernel (4,))"], "convolution over tokens"),
        (["aten.conv1d.default makes a dim of S + 3, which is not the sequence S"], "convolution over tokens"),
        (["aten.select.int picks single tokens (node select)"], "recurrence over tokens"),
        (["its attention runs over 49 tokens, not over a dim of the stream: windows or pooled keys"] * 2, "windows"),
        (["aten.conv1d.default convolves over tokens (kernel (4,))", "it returns more than the stream"], None),
        (["aten.topk.default makes a dim of Min(2, S), which is not the sequence S"], None),
    ],
)
def test_only_what_mixes_tokens_by_construction_is_left_out(skipped: list[str], expected: str | None) -> None:
    reasons = tuple((f"l.{i}", reason) for i, reason in enumerate(skipped))
    row = CoverageRow(
        "causal-lm", "m", "M", STAGES[:3], "blocks", "refused", f"l.0: {skipped[0]}", True, skipped=reasons
    )
    found = by_construction(row)
    assert found == expected or (expected is not None and str(found).startswith(expected))
    assert by_construction(replace(row, failed="unit")) is None


def test_the_report_shows_only_the_stages_that_ran() -> None:
    text = render(CoverageResult((ROUTED,), last="unit"))
    assert "| family | make | run | trace | blocks | unit |" in text
    assert "unit, (a) of all that trace" in text
    assert "tensorrt" not in text


def test_a_result_survives_json(tmp_path: Path) -> None:
    file = tmp_path / "coverage.json"
    file.write_text(RESULT.to_json())
    assert CoverageResult.from_json(file.read_text()) == RESULT


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": [{"name": 1}], "last": "unit", "versions": {}}'])
def test_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(StateError, match="this is no coverage result"):
        CoverageResult.from_json(text)


def test_two_runs_compare_model_by_model() -> None:
    better = CoverageRow("causal-lm", "b", "B", STAGES, attends=True, blocks=4)
    worse = CoverageRow("causal-lm", "a", "A", STAGES[:2], "trace", "refused", "a guard")
    other = CoverageRow("causal-lm", "c", "C", STAGES[:3], "blocks", "refused", "another reason")
    found = compare(RESULT, CoverageResult((better, worse, other, CoverageRow("image", "d", "D"))))
    assert found.gained == ("causal-lm/b: wrong at reference: off by 0.3 | more -> passed",)
    assert found.lost == ("causal-lm/a: passed -> refused at trace: a guard",)
    assert found.changed[0].endswith("no attention in it -> refused at blocks: another reason")
    assert (found.added, found.removed) == (("image/d",), ())
    assert "gained (1)\n  causal-lm/b" in str(found)


def test_a_shorter_run_is_compared_up_to_its_last_stage() -> None:
    short = CoverageResult((CoverageRow("causal-lm", "a", "A", STAGES[:5]),), last="unit")
    assert str(compare(short, CoverageResult((ROUTED,)))) == "nothing changed"
