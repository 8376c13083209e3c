"""Training as users do it: Hugging Face's Trainer, accelerate, LoRA; and quantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import modpass
from modpass.errors import StateError
from modpass.exporters import FixedShape, export_onnx, verify
from modpass.reference import Setting, routed_reference
from modpass.training import RoutingMixin, capacity_schedule, routers_only, routing_losses, schedule_callback
from tests.zoo import make, tokens


def labelled() -> modpass.RoutedModel:
    ids = tokens(2, 12)
    example = {"input_ids": ids, "labels": ids}
    return modpass.mod_transform(make("llama"), 0.25, predictor=True, example_inputs=example).train()


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.rows = torch.randint(2, 97, (16, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        str(folder),
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        **options,
    )


class RoutingTrainer(RoutingMixin, transformers.Trainer):
    routing_weights = {"router": 0.1, "z_loss": 0.01}  # noqa: RUF012


def test_the_trainer_adds_the_losses_logs_statistics_and_steps_schedules(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    model = labelled()
    schedule = capacity_schedule(model, 1.0, 0.25, steps=4)
    trainer = RoutingTrainer(
        model,
        arguments(tmp_path, max_steps=4, logging_steps=1, gradient_accumulation_steps=2),
        train_dataset=Rows(),
        callbacks=[schedule_callback(schedule)],
    )
    batch = {n: v[:4] for n, v in zip(("input_ids", "labels"), [Rows().rows] * 2, strict=True)}
    wanted = (model(**batch).loss + routing_losses(model, router=0.1, z_loss=0.01).total).item()
    assert trainer.compute_loss(model, batch).item() == pytest.approx(wanted)
    trainer.train()
    history = [h for h in trainer.state.log_history if "loss" in h]
    assert [h["routing/share"] for h in history] == pytest.approx([1.0, 9 / 12, 7 / 12, 5 / 12])
    assert history[-1]["loss"] < history[0]["loss"]
    assert abs(history[0]["loss"] - wanted) < 0.5 * wanted, "accumulated losses are summed, not averaged"
    assert {b.capacity for b in model.routed_blocks.values()} == {0.25}
    found = trainer.evaluate(Rows())
    assert "routing/share" not in found
    assert "eval_routing/model.layers.1/accuracy" in trainer.state.log_history[-1]


def test_a_loop_with_accelerate_trains() -> None:
    accelerate = pytest.importorskip("accelerate", reason="an extra of its own")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of the Trainer before
    model = labelled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss + routing_losses(model).total
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    assert sum(losses[-4:]) < sum(losses[:4])


def test_lora_on_the_dense_model_goes_through_the_pass() -> None:
    peft = pytest.importorskip("peft", reason="an extra of its own")
    ids = tokens(2, 12)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(make("llama"), config)
    routed = modpass.mod_transform(adapted, 1.0, gate="unit", example_inputs={"input_ids": ids}).eval()
    with torch.no_grad():
        assert torch.allclose(routed(input_ids=ids).logits, adapted.eval()(input_ids=ids).logits, atol=1e-4)
    names = {n for n, p in routed.named_parameters() if p.requires_grad}
    assert {n.rpartition(".layers.")[2].split(".")[0] for n in names if "lora_" in n} == {"0", "1", "2", "3"}
    assert all("lora_" in n or n.endswith("router.weight") for n in names)
    assert len(routers_only(routed)) == 2


def test_a_model_with_int8_weights_goes_through_the_pass_and_to_onnx(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="an extra of its own")
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    routed = modpass.mod_transform(model, 0.25, every=1, example_inputs=(torch.randn(2, 11, 64),))
    x = torch.randn(3, 17, 64)
    settings = {n: Setting(0.25, "linear", b.router.weight) for n, b in routed.routed_blocks.items()}
    with torch.no_grad(), routed_reference(model, settings) as reference:
        wanted = reference(x)
    with torch.no_grad():
        assert torch.allclose(routed(x), wanted, atol=1e-4)
    export_onnx(routed, tmp_path / "int8.onnx", FixedShape(2, 12))
    verify(routed, tmp_path / "int8.onnx").check()
    with pytest.raises(StateError, match=r"linear1.weight' is a \w+, which a file of plain tensors cannot hold"):
        modpass.save_pretrained(routed, tmp_path / "saved")
