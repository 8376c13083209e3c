"""Run requests of any size over a folder of fixed shapes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modpass.errors import InputError, StateError
from modpass.exporters.bucket_fit import Fit, fit
from modpass.exporters.bucket_manifest import Bucket, BucketManifest
from modpass.exporters.onnx_session import open_session, ports, refuse_bfloat16

__all__ = ["BucketSession"]


class BucketSession:
    """ONNX Runtime over the graphs that ``export_buckets`` wrote; may be called from several threads.

    A request runs in the bucket with the fewest tokens that holds it, padded, and its results are cut back.

    Args:
        folder: of ``export_buckets``, or a Triton repository of ``export_triton``; files are hashed before they are
            loaded.
        threads: processor threads of an operator; None leaves it to ONNX Runtime.
        providers: as ONNX Runtime takes them, such as ``["CUDAExecutionProvider"]``.

    Raises:
        StateError: it is no such folder, or a graph is not what its manifest says.
        VerificationError: a file is missing or has changed.
        ExportError: ONNX Runtime refuses a file.

    >>> import tempfile
    >>> from modpass.decode.example import tiny_decoder
    >>> from modpass.exporters.buckets import export_buckets
    >>> folder = tempfile.mkdtemp() + "/b"
    >>> _ = export_buckets(tiny_decoder(), folder, [(1, 4), (2, 8)])
    >>> BucketSession(folder)({"ids": [[1, 2, 3]]})["output"].shape
    (1, 3, 11)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        threads: int | None = None,
        providers: Sequence[Any] = ("CPUExecutionProvider",),
    ) -> None:
        self.manifest = BucketManifest.load(folder)
        refuse_bfloat16(Path(folder), self.manifest.dtype)
        self.manifest.check(folder)
        self._runs: dict[str, Any] = {}
        for bucket in self.manifest.buckets:
            path = Path(folder, bucket.file)
            session = open_session(path, threads=threads, providers=providers)
            _match(self.manifest, bucket, session)
            self._runs[bucket.label] = session

    def fit(self, inputs: Mapping[str, Any]) -> Fit:
        """The bucket that a request would run in, and its padded inputs.

        Raises:
            InputError: see ``__call__``.
        """
        return fit(self.manifest, inputs)

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The outputs by name, of the request's own sizes.

        Args:
            inputs: arrays, tensors on the CPU or nested lists by name; the padding mask may be left out.

        Raises:
            InputError: an input is missing, unknown or of a wrong shape or type; no bucket holds the request; or ONNX
                Runtime refuses its values, such as a token id that the model does not have.
        """
        request = self.fit(inputs)
        names = [p.name for p in self.manifest.outputs]
        try:
            found = self._runs[request.bucket.label].run(names, request.inputs)
        except Exception as e:  # pybind turns every kind of refusal into its own
            raise InputError(f"ONNX Runtime refuses the request in bucket {request.bucket.label}: {e}") from e
        return request.cut(dict(zip(names, found, strict=True)))


def _match(manifest: BucketManifest, bucket: Bucket, session: Any) -> None:
    """The graph takes and returns what the manifest says."""
    found = ports(session)
    for verb, specs, shapes in (
        ("takes", manifest.inputs, found.inputs),
        ("returns", manifest.outputs, found.outputs),
    ):
        wanted = {p.name: p.shape(bucket) for p in specs}
        if wanted.keys() != shapes.keys():
            raise StateError(f"'{bucket.file}' {verb} {', '.join(shapes)}; its manifest says {', '.join(wanted)}")
        for name, shape in wanted.items():
            if len(shape) != len(shapes[name]) or any(
                w not in (None, f) for w, f in zip(shape, shapes[name], strict=True)
            ):
                raise StateError(
                    f"'{name}' of '{bucket.file}' is {list(shapes[name])}; its manifest says {list(shape)}"
                )
