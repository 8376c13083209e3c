"""Every block of docs/serving.md runs; the Ray example answers, refuses and stops."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from modpass.decode.example import tiny_decoder
from modpass.exporters import export_buckets

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "serving.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.S)
COMMANDS = [line for kind, body in BLOCKS if kind == "bash" for line in body.splitlines() if line]
EXAMPLE = ROOT / "examples" / "ray_serve.py"


# Ray gives its own processes half a minute to start, and starts them as background work: too little beside other work.
SLOW_MACHINE = {"RAY_worker_niceness": "0"} | {
    f"RAY_SERVE_PROXY_{kind}_CHECK_TIMEOUT_S": "120" for kind in ("READY", "HEALTH")
}
LATE = ("timed out during startup", "proxies not available", "ActorDiedError")


def run(folder: Path, *command: str, tries: int = 1) -> subprocess.CompletedProcess[str]:
    """Run Python on these arguments in a folder; again, up to so many tries, where Ray came up too late."""
    environment = {**os.environ, **SLOW_MACHINE, "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    late = done.returncode and any(word in done.stderr for word in LATE)
    return run(folder, *command, tries=tries - 1) if late and tries > 1 else done


def test_python_blocks_run_one_after_the_other(tmp_path: Path) -> None:
    assert {kind for kind, _ in BLOCKS} == {"python", "bash"}
    done = run(tmp_path, "-c", "\n".join(body for kind, body in BLOCKS if kind == "python"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "Padding(sequence='right', batch=True, why='')",
        "4x64",
        "['encoder_1x16', 'encoder_1x64', 'encoder_4x64']",
        "encoder_4x64/1/model.onnx {'src': (4, 64, 64), 'src_key_padding_mask': (4, 64)}",
    ]


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 100


@pytest.mark.slow
def test_commands_run_and_two_hundred_requests_at_once_are_answered_as_by_the_local_session(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="pip install 'modpass[serve]'")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in COMMANDS:
        given = shlex.split(command)
        done = run(tmp_path, *(["-m", *given] if given[0] == "modpass" else given[1:]), tries=3)
        assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
        if "ray_serve" in command:
            assert "200 of 200 answers of 2 replicas equal the local session's" in done.stdout
    assert {"minilm-buckets", "minilm-repository"} <= {p.name for p in tmp_path.iterdir()}


_FAILING = """
import json, sys, urllib.error
sys.path.insert(0, sys.argv[1])
from ray_serve import ask, serving  # sets Ray's token before Ray is imported
import ray
try:
    with serving(sys.argv[2], replicas=1, port=int(sys.argv[3])) as address:
        for inputs in ({"ids": [[1] * 99]}, {"idle": 1}, [1]):
            try:
                ask(address, inputs)
            except urllib.error.HTTPError as e:
                print(e.code, json.load(e)["error"])
        print("shape", [len(row) for row in ask(address, {"ids": [[1, 2, 3]]})["output"]])
        raise KeyError("the client's own fault")
except KeyError as e:
    print(e, "ray runs:", ray.is_initialized())
"""


@pytest.mark.slow
def test_the_server_says_what_it_refuses_and_ends_with_its_client(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="pip install 'modpass[serve]'")
    export_buckets(tiny_decoder(), tmp_path / "b", [(1, 8)])
    done = run(tmp_path, "-c", _FAILING, str(EXAMPLE.parent), str(tmp_path / "b"), "8123", tries=3)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if "(raylet)" not in line]
    assert lines[0].startswith("400 the request has 1 row of 99 tokens; the largest buckets hold less")
    assert lines[1] == "400 there is no input 'idle'; the inputs are: ids"
    assert lines[2] == "400 a request is a list; give the inputs by name"
    assert lines[3:] == ["shape [3]", '"the client\'s own fault" ray runs: False']


def test_a_folder_that_is_none_is_refused_before_ray_starts(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="pip install 'modpass[serve]'")
    done = run(tmp_path, str(EXAMPLE), "absent")
    assert done.returncode == 1
    assert "there is no manifest 'absent/buckets.json'; so 'absent' is no folder of buckets" in done.stderr
