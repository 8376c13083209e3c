"""Serve a folder of buckets with Ray Serve: replicas that each hold a session, requests as JSON over HTTP.

Sends its requests all at once, compares the answers with those of a session of its own, and stops:
    python examples/ray_serve.py FOLDER --replicas 2 --requests 200  # needs pip install 'modpass[serve]'
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

# Ray's own ports listen on every interface: let nobody in who was not started from here, and report to nobody.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}

import numpy as np
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

from modpass.errors import InputError
from modpass.exporters import BucketSession


@serve.deployment
class Buckets:
    """One replica; a session takes requests from several threads."""

    def __init__(self, folder: str, threads: int) -> None:
        self.session = BucketSession(folder, threads=threads)

    async def __call__(self, request: Request) -> JSONResponse:
        """Inputs by name in, outputs by name out; a request that does not fit is told why."""
        try:
            outputs = await asyncio.to_thread(self.session, await request.json())
        except (InputError, ValueError) as e:
            return JSONResponse({"error": str(e)}, status_code=400)
        return JSONResponse({name: array.tolist() for name, array in outputs.items()})


@contextmanager
def serving(folder: str, replicas: int = 2, threads: int = 1, port: int = 8000) -> Iterator[str]:
    """The address of the server, which is up inside of the block and shut down behind it, however that ends."""
    try:
        ray.init(num_cpus=replicas * threads, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        logging.getLogger("ray.serve").setLevel("ERROR")
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        replica = Buckets.options(num_replicas=replicas, ray_actor_options={"num_cpus": threads})
        serve.run(replica.bind(os.path.abspath(folder), threads))
        yield f"http://127.0.0.1:{port}/"
    finally:
        try:
            if ray.is_initialized():  # else it would start a cluster to shut down
                serve.shutdown()
        finally:
            ray.shutdown()


def ask(address: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """One request, and its answer."""
    request = urllib.request.Request(address, json.dumps(inputs).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        outputs: dict[str, Any] = json.load(answer)
    return outputs


def main() -> None:
    """Ask the server and the local session the same."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", help="of 'modpass export --buckets', for a model of token ids")
    for name, value in {"replicas": 2, "threads": 1, "requests": 200, "port": 8000, "vocabulary": 11}.items():
        options.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    given = options.parse_args()
    local, draws = BucketSession(given.folder, threads=given.threads), np.random.default_rng(0)
    tokens, longest = local.manifest.inputs[0].name, max(b.sequence or 1 for b in local.manifest.buckets)
    lengths = draws.integers(1, longest, given.requests, endpoint=True)
    requests = [{tokens: draws.integers(given.vocabulary, size=(1, length)).tolist()} for length in lengths]
    place = (given.folder, given.replicas, given.threads, given.port)
    with serving(*place) as address, ThreadPoolExecutor(given.requests) as clients:
        answers = list(clients.map(lambda request: ask(address, request), requests))
    wanted = [{name: array.tolist() for name, array in local(request).items()} for request in requests]
    equal = sum(answer == want for answer, want in zip(answers, wanted, strict=True))
    print(f"{equal} of {len(requests)} answers of {given.replicas} replicas equal the local session's")
    raise SystemExit(equal != len(requests))


if __name__ == "__main__":
    main()
