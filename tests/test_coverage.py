"""The stages that a model goes through in the coverage run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modpass.bench import coverage
from modpass.bench.coverage import CoverageResult, CoverageRow
from modpass.bench.coverage_decode import render_decode, run_decode_stages
from modpass.bench.coverage_models import model_names
from modpass.bench.coverage_others import OTHERS, Other
from modpass.bench.coverage_stages import STAGES, run_stages
from tests.test_alone import Windowed, stack

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


def test_a_decoder_passes_up_to_onnxruntime() -> None:
    passed, facts, failure = stages_of("causal-lm", "gpt2", "onnxruntime")
    assert failure is None
    assert passed == list(STAGES[: STAGES.index("onnxruntime") + 1])
    assert facts == {"attends": True, "inferred": True, "blocks": 4, "parts": "block", "skipped": []}


def test_a_convolutional_net_is_refused_with_the_reason() -> None:
    passed, facts, failure = stages_of("image", "mobilenet_v1", "reference")
    assert passed[:2] == ["make", "run"]
    assert facts["attends"] is False
    assert failure == ("blocks", "refused", "no attention in it")


def test_a_model_of_which_only_a_branch_can_be_routed_goes_through_the_stages_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = Other("Windowed", lambda: (stack(Windowed, 12), {"input": torch.randn(2, 12, 16)}, None))
    monkeypatch.setitem(OTHERS, "windowed", other)
    passed, facts, failure = stages_of("other", "windowed", "onnxruntime")
    assert failure is None
    assert passed[-1] == "onnxruntime"
    assert (facts["parts"], facts["blocks"], facts["skipped"]) == ("mlp", 3, [])


def test_a_branch_that_computes_something_else_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from modpass.routing import RoutedBlock

    other = Other("Windowed", lambda: (stack(Windowed), {"input": torch.randn(2, 12, 16)}, None))
    monkeypatch.setitem(OTHERS, "windowed", other)
    choose = RoutedBlock.choose
    monkeypatch.setattr(RoutedBlock, "choose", lambda self, scores, *others: choose(self, -scores, *others))
    _, facts, failure = stages_of("other", "windowed", "reference")
    assert facts["parts"] == "mlp"
    assert failure[:2] == ("reference", "wrong")
    assert "is off from the per-token reference" in failure[2]


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
