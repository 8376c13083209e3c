"""Backends for a GPU, tried on the CPU: the same memory, the same writing, another driver under them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from modpass.decode.example import tiny_decoder
from modpass.errors import BuildError, InputError, MissingExtraError, StateError, VerificationError
from modpass.exporters import DecoderSession, export_decoder, trt_api
from modpass.exporters.backends import BACKENDS, backend_named
from modpass.exporters.device import Call, Device
from modpass.exporters.device_backend import DeviceBackend
from modpass.exporters.onnx_device import OnnxRuntimeCudaBackend
from modpass.exporters.settle import Places
from modpass.exporters.tensorrt_backend import TensorRTBackend
from tests.decoders import LENGTH, causal, dense
from tests.sealing import change
from tests.trt_fake import fake_build, fake_runtime

pytestmark = pytest.mark.slow  # four decoders are exported first
PROMPTS = [[5, 9, 11, 40, 33, 2], [7, 8, 9], [3, 4, 5, 6, 7, 8, 9, 10, 11], [60]]
Folders = dict[str, Path]
Install = Callable[..., Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Decoders for four rows and for one, each with engines beside its graphs."""
    target = tmp_path_factory.mktemp("decoders")
    made = {
        "dense": (dense("inner-rotary")[1], 4, None),
        "masked": (causal("llama", 0.25), 4, "masked"),
        "batch_capacity": (causal("inner-rotary", 0.5), 4, "batch_capacity"),
        "conditional": (causal("tril-buffer", 0.5), 1, "conditional"),
    }
    for name, (model, batch, skipping) in made.items():
        export_decoder(model, target / name, batch=batch, prompt=6, max_sequence=LENGTH, skipping=skipping)  # type: ignore[arg-type]
        fake_build(target / name, mark="stream_capturable=0" if skipping == "conditional" else "")
    return {name: target / name for name in made}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """One routed row, with engines."""
    torch.manual_seed(0)
    export_decoder(tiny_decoder(True), tmp_path / "tiny", prompt=4, max_sequence=12, skipping="masked")
    fake_build(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a TensorRT in place whose engines ONNX Runtime runs."""
    monkeypatch.setattr(trt_api, "_LOGGERS", {})

    def put(**options: Any) -> Any:
        module = fake_runtime(**options)
        monkeypatch.setitem(sys.modules, "tensorrt", module)
        return module

    return put  # type: ignore[return-value]


class Recording(Device):
    """A CPU that claims to have CUDA graphs: what is captured runs again at each replay."""

    def __init__(self, breaks: int = 0) -> None:
        super().__init__("cpu")
        self.captures, self.breaks = True, breaks
        self.captured: list[str] = []
        self.replays = 0

    def capture(self, call: Call) -> Call:
        call()
        if len(self.captured) < self.breaks:
            self.captured.append("failed")
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured.append(call.__name__)  # type: ignore[attr-defined]

        def replay() -> None:
            self.replays += 1
            call()

        return replay


def state(session: DecoderSession) -> dict[str, np.ndarray]:
    return {n: np.array(a) for n, a in session.backend.arrays.items()}


def check_like_the_cpu(folder: Path, backend: DeviceBackend) -> DecoderSession:
    """Tokens, statistics and the whole state, with prompts longer than the prefill and rows that end early."""
    plain, other = DecoderSession(folder), DecoderSession(folder, backend)
    rows = PROMPTS[: plain.manifest.batch]
    wanted = plain.generate(rows[:3], 12)
    stop = wanted.tokens[0][3]
    for session in (plain, other):
        session.generate(rows, 12, stop=[stop])
    wanted, found = plain.generate(rows[:3], 12, stop=[stop]), other.generate(rows[:3], 12, stop=[stop])
    assert found.tokens == wanted.tokens
    for field in ("tokens", "steps", "decisions", "skipped", "cache_bytes"):
        assert getattr(found.statistics, field) == getattr(wanted.statistics, field)
    assert len(found.tokens[0]) < 12
    for name, array in state(other).items():
        assert np.allclose(array, state(plain)[name], atol=1e-6), name
    return other


@pytest.mark.parametrize("name", ["dense", "masked", "batch_capacity", "conditional"])
def test_onnx_runtime_on_device_memory_generates_what_it_does_on_the_cpu(name: str, folders: Folders) -> None:
    check_like_the_cpu(folders[name], OnnxRuntimeCudaBackend("cpu"))


@pytest.mark.parametrize("name", ["dense", "masked", "batch_capacity", "conditional"])
def test_engines_generate_what_onnx_runtime_does(name: str, folders: Folders, install: Install) -> None:
    module = install()
    session = check_like_the_cpu(folders[name], TensorRTBackend("tensorrt", "cpu"))
    prefill, decode = module.engines
    backend = session.backend
    assert isinstance(backend, TensorRTBackend)
    assert backend.uncaptured == "a CPU has no CUDA graphs"
    for cache, array in backend.arrays.items():  # prefill writes where steps read
        assert prefill.addresses[cache] == decode.addresses[cache] == array.data_ptr()  # type: ignore[attr-defined]
    assert len(decode.streams) >= 6


def test_a_step_is_one_graph_at_fixed_addresses(folders: Folders, install: Install) -> None:
    module = install(capturable=True)
    backend = TensorRTBackend("tensorrt", "cpu")
    backend.device = device = Recording()
    session = DecoderSession(folders["masked"], backend)
    assert (device.captured, backend.uncaptured) == (["_run"], None)
    assert all(not a.any() for a in state(session).values())  # the runs before the capture leave no trace
    before = dict(module.engines[1].addresses)
    check_like_the_cpu(folders["masked"], backend)
    session.generate(PROMPTS, 4)
    assert module.engines[1].addresses == before
    assert device.replays > 12


@pytest.mark.parametrize(
    ("name", "capturable", "breaks", "reason"),
    [
        ("conditional", None, 0, "the plan has branches, which the host decides; export with skipping='masked'"),
        ("masked", False, 0, "TensorRT says that the plan cannot be captured"),
        ("masked", None, 1, "the capture failed: operation not permitted when stream is capturing"),
    ],
)
def test_what_cannot_be_captured_says_why_and_runs_with_the_writing_captured(
    name: str, capturable: bool | None, breaks: int, reason: str, folders: Folders, install: Install
) -> None:
    install(capturable=capturable)
    backend = TensorRTBackend("tensorrt", "cpu")
    backend.device = device = Recording(breaks)
    check_like_the_cpu(folders[name], backend)
    assert backend.uncaptured is not None
    assert backend.uncaptured.startswith(reason)
    assert device.captured[-1] == "_settle"


def test_a_swap_copies_and_keeps_the_addresses(tiny: Path) -> None:
    backend = OnnxRuntimeCudaBackend("cpu")
    DecoderSession(tiny, backend).generate([[1, 2]], 3)
    name = "blocks.1.count"
    backend.new[f"{name}.new"].fill_(2)
    before = backend.arrays[name].data_ptr()
    backend.swap({name: f"{name}.new"})
    assert backend.arrays[name].tolist() == [2]
    assert backend.arrays[name].data_ptr() == before


# What is refused


def spoil(folder: Path, name: str, **facts: Any) -> None:
    change(folder / f"{name}.engine.json", **facts)


def changed(folder: Path) -> None:
    path = folder / "decode.engine"
    path.write_bytes(path.read_bytes()[:-1] + b" ")


def longer(folder: Path) -> None:
    path = folder / "decode.engine"
    path.write_bytes(path.read_bytes() + b" ")


@pytest.mark.parametrize(
    ("error", "break_it", "words"),
    [
        (StateError, lambda f: (f / "decode.engine").unlink(),
         r"decode.engine' is missing; build it with: modpass build .*tiny --flavor tensorrt$"),
        (StateError, lambda f: (f / "prefill.engine.json").unlink(), r"prefill.engine.json' is missing; build it"),
        (StateError, lambda f: spoil(f, "decode", flavor="tensorrt-rtx"),
         r"decode.engine' is of tensorrt-rtx, not of tensorrt; build it with: modpass build"),
        (VerificationError, lambda f: spoil(f, "prefill", onnx_sha256="00"),
         r"prefill.engine' was built from another prefill.onnx than the one beside it; build it with"),
        (VerificationError, changed, r"decode.engine' is not the file its manifest was written for"),
        (VerificationError, longer, r"decode.engine' has \d+ bytes, its manifest says \d+; build it with"),
        (StateError, lambda f: spoil(f, "decode", versions={"tensorrt": "10.8"}),
         r"decode.engine' was built by TensorRT 10.8, this is 10.9, and a plan is read by its own version alone;"),
        (StateError, lambda f: spoil(f, "decode", versions={}), r"was built by TensorRT of an unknown version, this"),
        (StateError, lambda f: spoil(f, "decode", outputs=[]), r"the decode graph returns 'output', but it does not"),
        (BuildError, lambda f: spoil_plan(f), "made no engine of .*decode.engine': Error Code 6: the engine was built"),
    ],
    ids=["no engine", "no manifest", "other flavour", "other graph", "changed", "longer", "other version", "no version",
         "other shapes", "refused"],
)  # fmt: skip
def test_engines_are_checked_before_they_are_run(
    error: type[Exception], break_it: Callable[[Path], None], words: str, tiny: Path, install: Install
) -> None:
    module = install()
    break_it(tiny)
    with pytest.raises(error, match=words):
        DecoderSession(tiny, TensorRTBackend("tensorrt", "cpu"))
    assert error is BuildError or module.engines == []


def spoil_plan(folder: Path) -> None:
    """An engine that is whole, but not of this version."""
    fake_build(folder)
    path = folder / "decode.engine"
    path.write_text("other")
    from modpass.files import sha256

    spoil(folder, "decode", sha256=sha256(path), bytes=5)


def test_engines_for_another_gpu_are_refused_with_the_command_for_this_one(tiny: Path, install: Install) -> None:
    install()
    backend = TensorRTBackend("tensorrt", "cpu")
    backend.device.__class__ = type("Hopper", (Device,), {"capability": "9.0"})
    with pytest.raises(StateError, match=r"for compute capability 8.9, this GPU has 9.0; .*--compute-capability 9.0$"):
        DecoderSession(tiny, backend)


def test_an_engine_that_lacks_a_name_of_the_manifest_is_refused(tiny: Path, install: Install) -> None:
    install(change=lambda engine: engine.hidden.add("blocks.1.count.new"))
    with pytest.raises(StateError, match=r"the decode graph returns 'blocks.1.count.new', but it does not"):
        DecoderSession(tiny, TensorRTBackend("tensorrt", "cpu"))


def test_an_address_that_is_refused_is_named(tiny: Path, install: Install) -> None:
    install(change=lambda engine: setattr(engine, "refuses", "position"))
    with pytest.raises(BuildError, match="TensorRT refuses the address of 'position'"):
        DecoderSession(tiny, TensorRTBackend("tensorrt", "cpu"))


def test_an_engine_may_leave_out_an_input_that_nothing_reads(tiny: Path, install: Install) -> None:
    module = install(change=lambda engine: engine.hidden.update({"blocks.1.places"} & engine.inputs))
    found = DecoderSession(tiny, TensorRTBackend("tensorrt", "cpu")).generate([[1, 2]], 6).tokens
    assert found == DecoderSession(tiny).generate([[1, 2]], 6).tokens
    assert "blocks.1.places" not in module.engines[1].addresses


def test_a_session_names_its_backends(tiny: Path) -> None:
    with pytest.raises(InputError, match="backend is 'torch'; it must be one of 'onnxruntime', 'onnxruntime-cuda', "):
        DecoderSession(tiny, "torch")
    assert (
        DecoderSession(tiny, "onnxruntime").generate([[1]], 2).tokens == DecoderSession(tiny).generate([[1]], 2).tokens
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", [n for n in BACKENDS if n != "onnxruntime"])
def test_without_a_gpu_or_its_package_a_backend_says_so_before_loading(
    name: str, monkeypatch: pytest.MonkeyPatch, install: Install
) -> None:
    if name == "onnxruntime-cuda":
        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            with pytest.raises(MissingExtraError, match=r"ONNX Runtime's CUDA provider.* pip install 'modpass\[gpu\]'"):
                backend_named(name)
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    if name == "tensorrt":
        monkeypatch.setitem(sys.modules, "tensorrt", None)
        with pytest.raises(MissingExtraError, match=r"pip install 'modpass\[tensorrt\]'"):
            backend_named(name)
        install()
    if name == "tensorrt-rtx":
        pytest.importorskip("tensorrt_rtx", reason="pip install 'modpass[tensorrt-rtx]'")
    with pytest.raises(InputError, match=f"backend '{name}' needs an NVIDIA GPU, and PyTorch .* sees none"):
        backend_named(name)


@pytest.mark.parametrize(("shape", "dim"), [((3, 2, 5, 4), 2), ((3, 5, 2), 1), ((6, 5, 4), 1), ((3, 4, 2, 5), 3)])
def test_rows_are_written_where_plain_loops_write_them(shape: tuple[int, ...], dim: int) -> None:
    """Caches with heads in a dim of their own, merged into the batch, and with slots last."""
    cache, new = torch.randn(shape), torch.randn(*shape[:dim], 1, *shape[dim + 1 :])
    place, rows = torch.tensor([4, 0, 2]), torch.tensor([True, False, True])
    wanted, each = cache.clone(), shape[0] // 3
    for entry in range(shape[0]):
        if rows[entry // each]:
            wanted[entry].select(dim - 1, int(place[entry // each])).copy_(new[entry].select(dim - 1, 0))
    address = cache.data_ptr()
    Places(place, rows).write(cache, new, dim)
    assert torch.equal(cache, wanted)
    assert cache.data_ptr() == address
