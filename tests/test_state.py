"""Saving and loading: the same bits come back, a broken save costs nothing, a wrong file is refused."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import modpass
from modpass.errors import MissingExtraError, ModpassError, StateError
from tests.zoo import SIZES, ZOO, first, make

Change = Callable[[dict[str, Any]], Any]


def transform(name: str, **options: Any) -> modpass.RoutedModel:
    return modpass.mod_transform(
        make(name),
        0.5,
        example_inputs=ZOO[name].example_inputs(),
        padding_mask=ZOO[name].padding_mask,
        **options,
    )


@cache
def llama() -> modpass.RoutedModel:
    return transform("llama")


@cache
def decoder() -> modpass.RoutedModel:
    return transform("inner-rotary")


def small_llama(**config: Any) -> nn.Module:
    settings = transformers.LlamaConfig(vocab_size=97, **{**SIZES, **config})
    return transformers.LlamaForCausalLM(settings).eval()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    modpass.save_pretrained(llama(), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def saved_decoder(tmp_path: Path) -> Path:
    modpass.save_pretrained(decoder(), tmp_path / "decoder")
    return tmp_path / "decoder"


def edit(folder: Path, change: Change) -> None:
    path = folder / "modpass.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def edit_weights(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({n: t.clone() for n, t in tensors.items()}, folder / "model.safetensors")


def outputs(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return first(model(**inputs))


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {n: p.dtype for n, p in model.named_parameters()}


# Round trip


@pytest.mark.parametrize("name", ZOO)
def test_a_loaded_model_computes_the_same_bits(name: str, tmp_path: Path) -> None:
    routed = transform(name, gate="sigmoid", every=1)
    modpass.save_pretrained(routed, tmp_path)
    torch.manual_seed(7)
    dense = None if ZOO[name].examples is False else ZOO[name].make()
    loaded = modpass.load(tmp_path, model=dense)
    inputs = ZOO[name].inputs(3, 26, "left")
    assert torch.equal(outputs(loaded, inputs), outputs(routed, inputs))
    assert loaded.settings == routed.settings
    assert loaded.inputs == routed.inputs
    assert list(loaded.state_dict()) == list(routed.state_dict())


def test_a_dense_trace_comes_back_dense(tmp_path: Path) -> None:
    dense = modpass.trace(make("llama"))
    modpass.save_pretrained(dense, tmp_path)
    loaded = modpass.load(tmp_path)
    inputs = ZOO["llama"].inputs(2, 9, "none")
    assert loaded.routed_blocks == {}
    assert torch.equal(outputs(loaded, inputs), outputs(dense, inputs))


def test_tied_weights_are_stored_once_and_stay_tied(saved: Path) -> None:
    stored = load_file(saved / "model.safetensors")
    assert ("lm_head.weight" in stored) != ("model.embed_tokens.weight" in stored)
    loaded = modpass.load(saved)
    assert loaded.get_parameter("lm_head.weight") is loaded.get_parameter("model.embed_tokens.weight")


def test_weights_untied_by_the_user_stay_untied(tmp_path: Path) -> None:
    model = small_llama(tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)  # type: ignore[union-attr,operator]
    modpass.save_pretrained(modpass.mod_transform(model), tmp_path)
    loaded = modpass.load(tmp_path)
    embedding = loaded.get_parameter("model.embed_tokens.weight")
    assert torch.equal(loaded.get_parameter("lm_head.weight"), embedding + 1)


@pytest.mark.parametrize(
    ("dtype", "attention"), [(torch.float32, "eager"), (torch.bfloat16, "sdpa"), (torch.float16, "eager")]
)
def test_dtype_and_kind_of_attention_are_kept(dtype: torch.dtype, attention: str, tmp_path: Path) -> None:
    # .to casts the rotary frequencies too, which a model built in this dtype keeps in float32.
    routed = modpass.mod_transform(small_llama(attn_implementation=attention).to(dtype), 0.5)
    modpass.save_pretrained(routed, tmp_path)
    loaded = modpass.load(tmp_path)
    inputs = ZOO["llama"].inputs(2, 31, "right")
    assert dtypes(loaded) == dtypes(routed)
    assert loaded.get_parameter("model.layers.1.router.weight").dtype == torch.float32
    assert torch.equal(outputs(loaded, inputs), outputs(routed, inputs))


def test_what_was_traced_is_traced_again(tmp_path: Path) -> None:
    example = {"inputs_embeds": torch.randn(2, 11, 48), "use_cache": False, "logits_to_keep": 1}
    routed = modpass.mod_transform(small_llama(), 0.5, example_inputs=example)
    modpass.save_pretrained(routed, tmp_path)
    loaded = modpass.load(tmp_path)
    inputs = {"inputs_embeds": torch.randn(3, 19, 48)}
    assert outputs(loaded, inputs).shape == (3, 1, 97)
    assert torch.equal(outputs(loaded, inputs), outputs(routed, inputs))


def test_example_inputs_are_not_stored_but_their_range_is(saved: Path) -> None:
    loaded, ids = modpass.load(saved), llama().inputs[0].example
    assert ids is not None
    found = loaded.inputs[0].example
    assert found is not None
    assert found.shape == ids.shape
    assert not torch.equal(found, ids)
    assert (found.min(), found.max()) == (ids.min(), ids.max())


def test_a_capacity_changed_after_the_transform_is_the_one_saved(tmp_path: Path) -> None:
    routed = transform("llama")
    routed.routed_blocks["model.layers.3"].capacity = 0.25
    modpass.save_pretrained(routed, tmp_path)
    loaded = modpass.load(tmp_path)
    capacities = {n: b.capacity for n, b in loaded.routed_blocks.items()}
    assert capacities == {"model.layers.1": 0.5, "model.layers.3": 0.25}


def test_a_loaded_model_is_in_eval_mode_and_can_be_saved_again(saved: Path) -> None:
    loaded = modpass.load(saved)
    assert not any(m.training for m in loaded.modules())
    modpass.save_pretrained(loaded, saved)  # over the file that its weights were read from
    inputs = ZOO["llama"].inputs(2, 9, "none")
    assert torch.equal(outputs(modpass.load(saved), inputs), outputs(llama(), inputs))


def test_a_given_model_takes_over_the_weights_and_shares_them(saved_decoder: Path) -> None:
    model = ZOO["inner-rotary"].make().double()
    loaded = modpass.load(saved_decoder, model=model)
    assert loaded.get_parameter("blocks.0.mlp.0.weight") is model.get_parameter("blocks.0.mlp.0.weight")
    assert model.get_parameter("head.weight").dtype == torch.float32


def test_a_model_on_the_meta_device_is_filled(saved_decoder: Path) -> None:
    with torch.device("meta"):
        model = ZOO["inner-rotary"].make()
    inputs = ZOO["inner-rotary"].inputs(2, 13, "none")
    assert torch.equal(outputs(modpass.load(saved_decoder, model=model), inputs), outputs(decoder(), inputs))


def test_nothing_is_pickled(saved: Path) -> None:
    assert sorted(p.name for p in saved.iterdir()) == ["model.safetensors", "modpass.json"]
    json.loads((saved / "modpass.json").read_text())


def test_whoever_may_read_one_file_may_read_the_other(saved: Path) -> None:
    assert len({p.stat().st_mode for p in saved.iterdir()}) == 1


def test_a_loaded_model_trains_and_the_file_stays_as_it_was(saved: Path) -> None:
    before = (saved / "model.safetensors").read_bytes()
    loaded = modpass.load(saved).train()
    optimizer = torch.optim.SGD(loaded.parameters(), 0.1)
    loss = first(loaded(**ZOO["llama"].inputs(2, 9, "none"))).square().mean()
    loss.backward()
    optimizer.step()
    assert loaded.get_parameter("model.layers.1.router.weight").grad is not None
    assert (saved / "model.safetensors").read_bytes() == before


# Saving


_KILLED = """
import os, signal, sys, torch, modpass.state
from tests.bench_decoder import decoder
model, inputs = decoder()
routed = modpass.mod_transform(model, 0.25, example_inputs=inputs)
def killed(tensors, path, **_):
    open(path, "wb").write(b"half a file")
    os.kill(os.getpid(), signal.SIGKILL)
modpass.state.save_file = killed
modpass.save_pretrained(routed, sys.argv[1])
"""


def test_a_killed_save_leaves_the_older_folder_working(saved: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _KILLED, str(saved)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], check=False)
    assert done.returncode == -signal.SIGKILL
    inputs = ZOO["llama"].inputs(2, 9, "none")
    assert torch.equal(outputs(modpass.load(saved), inputs), outputs(llama(), inputs))


def test_a_failed_save_leaves_the_older_folder_only(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    before = (saved / "modpass.json").read_bytes()
    monkeypatch.setattr("modpass.state.save_file", full)
    with pytest.raises(StateError, match=r"cannot be written: .*No space left"):
        modpass.save_pretrained(llama(), saved)
    assert (saved / "modpass.json").read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == ["model"]


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("dear")
    with pytest.raises(StateError, match=r"holds 'thesis.tex', which saving would remove; give a new or"):
        modpass.save_pretrained(llama(), tmp_path)
    with pytest.raises(StateError, match="is a file; give a folder"):
        modpass.save_pretrained(llama(), tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "dear"


def test_blocks_that_differ_in_their_gate_are_not_saved(tmp_path: Path) -> None:
    routed = transform("inner-rotary")
    routed.routed_blocks["blocks.3"].gate = "unit"
    with pytest.raises(StateError, match=r"block 'blocks.3' has the gate 'unit', .* with 'linear'; only one"):
        modpass.save_pretrained(routed, tmp_path)


def test_a_model_without_values_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"is on the meta device and has no values"):
        modpass.save_pretrained(transform("inner-rotary").to("meta"), tmp_path)  # type: ignore[arg-type]


# Refusals of a file


def _set(*path: Any, to: Any) -> Change:
    def change(raw: dict[str, Any]) -> None:
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = to

    return change


def _drop(*path: Any) -> Change:
    def change(raw: dict[str, Any]) -> None:
        for key in path[:-1]:
            raw = raw[key]
        del raw[path[-1]]

    return change


CAPACITY = ("settings", "capacity", "model.layers.1")

WRONG: dict[str, tuple[Change, str]] = {
    "other schema": (_set("schema", to=7), r"has schema 7, this modpass \(.*\) reads schema 1; save"),
    "no schema": (_drop("schema"), r"has schema None"),
    "missing field": (_drop("source"), "has no field 'source'"),
    "unknown field": (_set("colour", to=1), "has the field 'colour', which schema 1 does not have"),
    "wrong type": (_set("settings", to=[1]), r"'settings' is \[1\]; it must be an object"),
    "wrong inner type": (_set("inputs", "input_ids", to=3), r"'inputs.input_ids' is 3; it must be a text"),
    "wrong buffers": (_set("buffers", to=[1]), r"'buffers.0' is 1; it must be a text"),
    "wrong attention": (_set("attention", to=3), r"'attention' is 3; it must be a text or null"),
    "missing setting": (_drop("settings", "gate"), "has no setting 'gate'"),
    "unknown setting": (
        _set("settings", "depth", to=1),
        r"has the setting 'depth', which this modpass .* not know",
    ),
    "setting of a wrong type": (
        _set("settings", "capacity", to=0.5),
        r"'settings.capacity' is 0.5; it must be an",
    ),
    "capacity above 1": (_set(*CAPACITY, to=1.5), r"capacity of block 'model.layers.1' is 1.5; it must be"),
    "capacity of a wrong type": (_set(*CAPACITY, to="half"), r"capacity of block 'model.layers.1' is 'half'"),
    "no such block": (_set("settings", "capacity", "layers.9", to=0.5), "there is no block 'layers.9'"),
    "no such gate": (_set("settings", "gate", to="golden"), "gate is 'golden'; it must be one of"),
    "no such selection": (_set("settings", "selection", to="x"), "selection is 'x'; it must be one of"),
    "no such mask": (_set("settings", "padding_mask", to="pads"), "padding_mask 'pads' is no traced input"),
    "no such class": (_set("source", "class", to="GoneModel"), "from 'GoneModel', which is no model class"),
    "no model class": (
        _set("source", "class", to="LlamaConfig"),
        "from 'LlamaConfig', which is no model class",
    ),
    "no class of a model": (
        _set("source", "class", to="pipeline"),
        "from 'pipeline', which is no model class",
    ),
    "no configuration": (_drop("source", "config"), "cannot be built from the configuration in"),
    "other configuration": (
        _set("source", "config", "intermediate_size", to=96),
        r"shape \[48, 80\] in .* \[48, 96\]",
    ),
    "fewer layers": (
        _set("source", "config", "num_hidden_layers", to=3),
        r"holds the weight 'model.layers.3",
    ),
    "more layers": (_set("source", "config", "num_hidden_layers", to=5), r"holds no weight 'model.layers.4"),
    "tie to nothing": (_set("tied", "x", to="y"), "ties 'x' to 'y', which model.safetensors does not hold"),
    "no such input": (
        _set("inputs", "extra", to="int64"),
        r"traced with the inputs input_ids \(int64\), .*extra \("
        r"int64\), and LlamaForCausalLM is now traced with .*; give example_inputs=",
    ),
    "broken example": (
        _set("examples", "input_ids", to={"shape": 3}),
        r"example of input 'input_ids' is .*; it needs",
    ),
    "example of no dtype": (
        _set("examples", "input_ids", "dtype", to="nn"),
        "example of input 'input_ids' is",
    ),
    "no examples": (_set("examples", to=None), "does not say what the model takes .*; give example_inputs="),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused_in_words(case: str, saved: Path) -> None:
    change, message = WRONG[case]
    edit(saved, change)
    with pytest.raises(StateError, match=message):
        modpass.load(saved)


WRONG_WEIGHTS: dict[str, tuple[Change, str]] = {
    "missing": (lambda t: t.pop("model.norm.weight"), "no weight 'model.norm.weight', which Llama"),
    "unknown": (
        lambda t: t.update(extra=torch.ones(1)),
        "the weight 'extra', which LlamaForCausalLM does not",
    ),
    "shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(47)}),
        r"norm.weight' has the shape \[47\] in",
    ),
    "router": (lambda t: t.pop("model.layers.1.router.weight"), "'model.layers.1.router.weight', the router"),
    "router shape": (
        lambda t: t.update({"model.layers.1.router.weight": torch.ones(1)}),
        r"'model.layers.1.router.weight' has the shape \[1\] in .* and \[48\] in the model",
    ),
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_wrong_weights_are_refused_by_key(case: str, saved: Path) -> None:
    change, message = WRONG_WEIGHTS[case]
    edit_weights(saved, change)
    with pytest.raises(StateError, match=message):
        modpass.load(saved)


def test_a_folder_that_was_not_saved_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"is no folder saved by modpass: it has no modpass.json"):
        modpass.load(tmp_path / "absent")
    (saved / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(StateError, match=r"model.safetensors' cannot be read as safetensors"):
        modpass.load(saved)
    (saved / "model.safetensors").unlink()
    with pytest.raises(StateError, match=r"has no model.safetensors; save the model again"):
        modpass.load(saved)
    (saved / "modpass.json").write_text("{half")
    with pytest.raises(StateError, match=r"modpass.json' cannot be read"):
        modpass.load(saved)
    (saved / "modpass.json").write_text("[]")
    with pytest.raises(StateError, match="has schema 'list'"):
        modpass.load(saved)


def test_a_model_that_modpass_cannot_build_is_asked_for(saved_decoder: Path) -> None:
    with pytest.raises(StateError, match=r"is a Decoder, which modpass cannot build; .* give it as model="):
        modpass.load(saved_decoder)
    with pytest.raises(StateError, match=r"model is a str; it must be the dense torch.nn.Module"):
        modpass.load(saved_decoder, model="decoder")  # type: ignore[arg-type]


def test_a_given_model_that_does_not_fit_is_left_as_it_was(saved_decoder: Path) -> None:
    model = make("tril-buffer")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(StateError, match=r"no weight 'blocks.0.attn.tril', which Decoder has \(and 3 more\)"):
        modpass.load(saved_decoder, model=model)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_a_missing_transformers_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'modpass\[hf\]'"):
        modpass.load(saved)


def test_a_tensor_made_of_others_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    dense = nn.Linear(3, 3)
    routed = modpass.trace(dense, (torch.randn(2, 3),))
    parts = torch.randn(3, 3), torch.randn(3, 3)
    routed.weight = nn.Parameter(TwoTensor(*parts), requires_grad=False)  # type: ignore[no-untyped-call]
    with pytest.raises(StateError, match="'weight' is a TwoTensor, which a file of plain tensors cannot hold"):
        modpass.save_pretrained(routed, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_model_that_is_pickled_says_what_to_save_instead(tmp_path: Path) -> None:
    model = transform("llama")
    for save in (lambda: torch.save(model, tmp_path / "model.pt"), lambda: pickle.dumps(nn.Sequential(model))):
        with pytest.raises(
            ModpassError, match=r"torch\.save\(model\.state_dict\(\), path\), or .* modpass\.save_pretrained"
        ):
            save()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    model.load_state_dict(torch.load(tmp_path / "weights.pt"))
