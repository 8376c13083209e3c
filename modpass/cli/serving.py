"""What ``modpass export`` writes for servers: a folder of buckets, a Triton repository."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modpass.cli.console import console, mebibytes, status
from modpass.errors import InputError
from modpass.model import RoutedModel

if TYPE_CHECKING:
    from modpass.exporters import BucketManifest

__all__ = ["Buckets", "Instances", "OutFolder", "Serving", "Triton"]

Buckets = Annotated[
    str | None,
    typer.Option(
        "--buckets",
        metavar="BxS[,BxS]",
        show_default=False,
        help="Write a file for each of these shapes into the folder --out, over one file of weights: 1x256,8x1024.",
    ),
]
OutFolder = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", file_okay=False, show_default=False, help="The folder for --buckets."),
]
Triton = Annotated[
    Path | None,
    typer.Option(
        "--triton",
        metavar="DIR",
        file_okay=False,
        show_default=False,
        help="Write a model repository for NVIDIA Triton Inference Server: one model for each of --buckets, or of "
        "what MODEL names: a folder of --buckets, an ONNX file or an engine that modpass wrote.",
    ),
]
Instances = Annotated[
    int, typer.Option("--instances", metavar="N", min=1, help="Copies of each Triton model that run side by side.")
]


class Serving:
    """The options for servers; false where none was given.

    Raises:
        typer.BadParameter: options that do not go together.
    """

    def __init__(
        self, buckets: str | None, folder: Path | None, triton: Path | None, instances: int, out: Path | None
    ) -> None:
        from modpass.exporters.buckets import parse_buckets

        self.folder, self.triton, self.instances = folder, triton, instances
        try:
            self.buckets = parse_buckets(buckets) if buckets is not None else None
        except InputError as e:
            raise typer.BadParameter(str(e), param_hint="'--buckets'") from e
        if out is None and not self:
            raise typer.BadParameter("name the file to write", param_hint="'OUT.onnx'")
        if out is not None and self:
            raise typer.BadParameter(f"'{out}' is for one ONNX file; folders go to --out and --triton; leave it out",
                                     param_hint="'OUT.onnx'")  # fmt: skip
        if self.buckets is not None and folder is None and triton is None:
            raise typer.BadParameter("name the folder to write, by --out or --triton", param_hint="'--buckets'")
        if folder is not None and self.buckets is None:
            raise typer.BadParameter(
                "it is the folder for --buckets; give these, or leave it out", param_hint="'--out'"
            )

    def __bool__(self) -> bool:
        return self.buckets is not None or self.folder is not None or self.triton is not None

    def shapes(self, batch: int, sequence: int | None) -> list[tuple[int, int | None]]:
        """The buckets, which --batch and --sequence are for where there is no --buckets.

        Raises:
            typer.BadParameter: both were given.
        """
        if self.buckets is None:
            return [(batch, sequence)]
        if sequence is not None or batch != 1:
            flag = "--batch" if batch != 1 else "--sequence"
            raise typer.BadParameter("the buckets say it already; leave it out", param_hint=f"'{flag}'")
        return self.buckets

    def repack(self, model: str) -> bool:
        """Write the repository, if MODEL is what modpass exported before; whether it is."""
        from modpass.exporters.bucket_manifest import FILE
        from modpass.exporters.manifest import manifest_path

        path = Path(model)
        if self.triton is None or not ((path / FILE).is_file() or (path.is_file() and manifest_path(path).is_file())):
            return False
        if self.buckets is not None:
            message = f"'{path}' is exported already and keeps its shapes; leave it out"
            raise typer.BadParameter(message, param_hint="'--buckets'")
        self._repository(path, None)
        return True

    def write(
        self,
        model: RoutedModel,
        shapes: Sequence[tuple[int, int | None]],
        name: str,
        verify: bool | None,
        **options: Any,
    ) -> None:
        """Write the buckets, compare each with the model, and write the repository."""
        from modpass.exporters import export_buckets
        from modpass.exporters.own_folder import own_folder
        from modpass.exporters.triton import FILE

        if self.triton is not None:
            own_folder(self.triton, FILE)
        with self._place() as folder:
            with status("exporting"):
                manifest = export_buckets(model, folder, shapes, **options)
            if self.folder is not None:
                _print_written(folder, manifest)
            if verify is not False and manifest.dtype != "bfloat16":
                _compare(model, folder, manifest)
            if self.triton is not None:
                self._repository(folder, name)

    @contextmanager
    def _place(self) -> Iterator[Path]:
        """The folder of the buckets: the one asked for, or one that a repository is made from alone."""
        if self.folder is not None:
            yield self.folder
            return
        with tempfile.TemporaryDirectory(prefix="modpass-") as temporary:
            yield Path(temporary, "buckets")

    def _repository(self, source: Path, name: str | None) -> None:
        from modpass.exporters import export_triton

        assert self.triton is not None
        plain = name and re.sub(r"[^A-Za-z0-9_.-]+", "-", name.rpartition(":")[2])
        models = export_triton(source, self.triton, plain, instances=self.instances)
        console().print(f"wrote {self.triton} (Triton models: {', '.join(models)})", markup=False)


def _compare(model: RoutedModel, folder: Path, manifest: BucketManifest) -> None:
    """Run each file beside the model, and complain where they differ."""
    from modpass.exporters import verify

    for bucket in manifest.buckets:
        with status(f"comparing {bucket.file} with PyTorch"):
            report = verify(model, folder / bucket.file)
        console().print(f"{bucket.label} in ONNX Runtime beside PyTorch, {report}", markup=False)
        report.check()


def _print_written(folder: Path, manifest: BucketManifest) -> None:
    sizes = ", ".join(f"{n} {mebibytes((folder / n).stat().st_size)}" for n in manifest.files)
    screen = console()
    screen.print(f"wrote {folder} ({sizes})", markup=False)
    padding, tokens = manifest.padding, any(b.sequence for b in manifest.buckets)
    side = f"padded on the {padding.sequence}" if padding.sequence else "never padded"
    facts = [f"tokens are {side}"] * tokens + [f"rows are {'added' if padding.batch else 'never added'}"]
    screen.print(f"smaller requests: {', '.join(facts)}{f' ({padding.why})' if padding.why else ''}", markup=False)
