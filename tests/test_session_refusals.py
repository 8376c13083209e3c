"""What a session refuses, by the text: arguments, decoder.json, folders, dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import modpass
from modpass.decode.example import Block, tiny_decoder
from modpass.errors import ExportError, InputError, StateError
from modpass.exporters import DecoderManifest, DecoderSession, export_decoder
from modpass.exporters.sampling import Sampler
from tests.decoders import tiny_folder
from tests.sealing import change


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny routed decoder for two rows over 11 tokens."""
    return tiny_folder(tmp_path_factory.mktemp("decoder") / "tiny")


@pytest.fixture(scope="module")
def session(folder: Path) -> DecoderSession:
    return DecoderSession(folder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'; it must be 0 (the likeliest token) or a number above"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": None}, "temperature is None"),
        ({"temperature": True}, "temperature is True"),
        ({"top_k": 0}, "top_k is 0; it must be None (all tokens) or a whole number of 1 or more"),
        ({"top_k": 2.0}, "top_k is 2.0"),
        ({"top_k": "2"}, "top_k is '2'"),
        ({"top_p": 0}, "top_p is 0; it must be None (all tokens) or a number in (0, 1]"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": "all"}, "top_p is 'all'"),
        ({"seed": "now"}, "seed is 'now'; it must be None (draws differ) or a whole number of 0 or more"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1.0}, "seed is 1.0"),
        ({"stop": 2}, "stop is 2; give the token ids that end a row, such as [2]"),
        ({"stop": "ab"}, "stop is 'ab'"),
        ({"stop": [1, "b"]}, "stop is [1, 'b']"),
        ({"stop": None}, "stop is None"),
        ({"stream": "stdout"}, "stream is 'stdout'; give a function of (row, token), or None"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5; it must be a whole number of 1 or more"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"max_new_tokens": "3"}, "max_new_tokens is '3'"),
        ({"prompts": "text"}, "prompts is 'text'; give a list with a list of token ids for each row"),
        ({"prompts": 5}, "prompts is 5"),
        ({"prompts": [5]}, "prompt 0 is 5; give a list of token ids, whole numbers of 0 or more"),
        ({"prompts": ["text"]}, "prompt 0 is 'text'"),
        ({"prompts": [[1], [1.0]]}, "prompt 1 is [1.0]"),
        ({"prompts": [[-1]]}, "prompt 0 is [-1]"),
        ({"prompts": [[1], [3, 11]]}, "prompt 1 has the token id 11; this model's are 0 to 10 (is the tokenizer that"),
    ],
)
def test_arguments_of_generate_are_refused_by_name_value_and_what_is_allowed(
    session: DecoderSession, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError) as caught:
        session.generate(**{"prompts": [[1]], "max_new_tokens": 2, **options})
    assert str(caught.value).startswith(words)


def test_numbers_of_numpy_and_sets_of_stop_ids_are_taken(session: DecoderSession) -> None:
    whole = session.generate([[np.int64(1), 2]], np.int64(3), temperature=np.float32(0), stop={99}).tokens
    assert whole == session.generate([[1, 2]], 3).tokens
    Sampler(1, top_k=np.int32(2), top_p=1, seed=np.int64(3))


def test_the_largest_id_of_the_vocabulary_is_taken(session: DecoderSession) -> None:
    assert session.manifest.vocabulary == 11
    assert len(session.generate([[10]], 2).tokens[0]) == 2


# decoder.json


def edited(folder: Path, target: Path, **facts: Any) -> Path:
    """A copy with other facts; None takes one out."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    change(target / "decoder.json", **facts)
    return target


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"batch": None}, "misses fields: 1 required positional argument: 'batch'"),
        ({"caches": None}, "misses fields: 1 required positional argument: 'caches'"),
        ({"batch": "two"}, "'batch' must be int, found 'two'"),
        ({"batch": 0}, "'batch' must be 1 or more, found 0"),
        ({"prompt": 1.5}, "'prompt' must be int, found 1.5"),
        ({"max_sequence": True}, "'max_sequence' must be int, found True"),
        ({"vocabulary": -3}, "'vocabulary' must be 1 or more, found -3"),
        ({"tokens": 3}, "'tokens' must be str, found 3"),
        ({"skipping": "never"}, "'skipping' is 'never', allowed are 'masked', 'conditional', 'batch_capacity'"),
        ({"caches": {}}, "'caches' must be list, found {}"),
        ({"caches": [{"name": "a", "shape": [2, "x"], "dim": 1}]}, "'caches[0].shape' must be int, found 'x'"),
        ({"caches": [{"name": "a", "shape": [2, 3], "dim": 2}]}, "'caches[0].dim' is 2, no dim behind the first"),
        ({"caches": [{"name": "a", "shape": [2, 3]}]}, "misses caches[0]: 1 required positional argument: 'dim'"),
        ({"routing": [7]}, "'routing[0]' must be dict, found 7"),
        ({"routing": [{"caches": []}]}, "'routing[0].slots' must be int, found None"),
        ({"files": {"decode.onnx": 1}}, "files['decode.onnx']' must be str, found 1"),
        ({"colour": "blue"}, "has the unknown field 'colour'"),
        ({"schema": 1}, "has schema 1, of an older modpass; this one"),
        # whole, but of another model
        ({"tokens": "words"}, "the decode graph takes 'words', but it does not; export again"),
        ({"logits": "scores"}, "the decode graph returns 'scores', but it does not"),
        ({"batch": 3}, "'ids' of the decode graph is [3, 1], but it is [2, 1]"),
        ({"prompt": 7}, "'ids' of the prefill graph is [2, 7], but it is [2, 4]"),
    ],
)
def test_a_decoder_json_that_does_not_fit_is_refused_in_words(
    folder: Path, tmp_path: Path, facts: dict[str, Any], words: str
) -> None:
    with pytest.raises(StateError) as caught:
        DecoderSession(edited(folder, tmp_path / "d", **facts))
    assert words in str(caught.value)
    assert "decoder.json" in str(caught.value)


def test_a_folder_that_is_no_decoder_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_text("{}")
    for path in (tmp_path, tmp_path / "absent", file):
        with pytest.raises(
            StateError, match=r"there is no manifest '.*decoder.json'; so '.*' is no decoder folder; 'modpass exp"
        ):
            DecoderSession(path)
    (tmp_path / "decoder.json").write_bytes(b"\xff\xfe")
    with pytest.raises(StateError, match=r"decoder.json' cannot be read: "):
        DecoderManifest.load(tmp_path)


def test_a_folder_that_holds_something_else_is_not_replaced(tmp_path: Path) -> None:
    note = tmp_path / "notes" / "mine.txt"
    note.parent.mkdir()
    note.write_text("kept")
    with pytest.raises(InputError, match=r"notes' holds other files, which an export would replace; name a folder of"):
        export_decoder(tiny_decoder(), note.parent, prompt=4, max_sequence=8)
    with pytest.raises(InputError, match=r"mine.txt' is a file; name a folder"):
        export_decoder(tiny_decoder(), note, prompt=4, max_sequence=8)
    assert note.read_text() == "kept"


def test_bfloat16_is_refused_before_onnx_runtime_reads_it(tmp_path: Path) -> None:
    export_decoder(tiny_decoder(), tmp_path / "d", prompt=4, max_sequence=8, dtype="bfloat16")
    assert DecoderManifest.load(tmp_path / "d").dtype == "bfloat16"
    with pytest.raises(ExportError, match=r"is in bfloat16, which ONNX Runtime has no kernels for; export with dtype="):
        DecoderSession(tmp_path / "d")


class Wide(nn.Module):
    """Scores more ids than it can read: a head of 16 over a table of 11; or, without a table, over one-hot ids."""

    def __init__(self, table: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8) if table else nn.Linear(16, 8)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        one_hot = (ids[..., None] == torch.arange(16)).float()
        x = self.embed(ids.long() if isinstance(self.embed, nn.Embedding) else one_hot)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize(("table", "ids"), [(True, 11), (False, 16)])
def test_ids_that_the_model_cannot_read_are_not_drawn(table: bool, ids: int, tmp_path: Path) -> None:
    model = Wide(table).eval()
    with torch.no_grad():
        model.head.bias[12] = 100.0
    traced = modpass.trace(model, (torch.arange(10, dtype=torch.int32).reshape(2, 5),))
    export_decoder(traced, tmp_path / "d", prompt=4, max_sequence=8)
    session = DecoderSession(tmp_path / "d")
    assert session.manifest.vocabulary == ids
    assert (12 in session.generate([[1]], 4).tokens[0]) is (not table)
