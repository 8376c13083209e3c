"""All rows of one GPU in one go: ``bench/gpu.sh`` runs this in a plain checkout, with torch and little else.

What a row needs beyond torch is looked for when its turn comes; a row that cannot run says why.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from modpass.bench.cases import Case
from modpass.bench.decode_models import Decoder
from modpass.bench.hardware import no_gpu
from modpass.bench.measuring import Plan, Runner, begin, measure
from modpass.bench.result import Result, Row
from modpass.bench.sources import Source
from modpass.bench.torch_runner import TorchRunner
from modpass.bench.variants import make_variants
from modpass.errors import ModpassError
from modpass.files import whole_file

__all__ = ["ROWS", "Size", "main", "measure_gpu"]

ROWS = ("torch-cuda", "torch-graphs-cuda", "onnxruntime-cuda", "onnxruntime-tensorrt", "tensorrt-rtx", "tensorrt")
DRY_ROWS = ("torch", "torch-compile", "onnxruntime", "tensorrt-rtx", "tensorrt")
NEEDED = ("torch-cuda", "torch-graphs-cuda")  # torch alone runs these, so one that does not is a failure


@dataclass(frozen=True)
class Size:
    """The decoder and the shape of its input."""

    blocks: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    sequence: int
    dtype: str


REAL = Size(blocks=8, width=1536, heads=12, vocabulary=32_000, batch=4, sequence=2048, dtype="float16")
TINY = Size(blocks=2, width=32, heads=2, vocabulary=64, batch=2, sequence=64, dtype="float32")


def measure_gpu(
    size: Size,
    rows: Sequence[str],
    plan: Plan,
    keep: Callable[[Result], None],
    seconds: float = 400.0,
    say: Callable[[str], None] = print,
) -> Result:
    """Measure a random decoder dense and routed under each of ``rows``.

    Args:
        size: of the decoder and its input.
        rows: names of runners; one whose packages are missing keeps its row with the reason.
        plan: how long to measure each.
        keep: called with what there is after each row.
        seconds: a row that would begin later than this after the start fails instead.
        say: told about each row.

    Raises:
        ModpassError: the decoder cannot be traced or routed.
    """
    start = time.monotonic()
    torch.manual_seed(0)
    dtype: torch.dtype = getattr(torch, size.dtype)
    model = Decoder(size.blocks, size.width, size.heads, size.vocabulary).to(dtype).eval()
    ids = torch.randint(size.vocabulary, (size.batch, size.sequence))
    case = Case("random decoder", size.batch, size.sequence, gate="unit", dtype=size.dtype)
    variants = make_variants(case, Source(model, {"input_ids": ids[:, :16].contiguous()}, case.model))
    inputs = {"input_ids": ids}
    result = begin(variants, case.model, inputs)
    say(f"{size}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters, ideal {result.ideal:.2f}x")
    with tempfile.TemporaryDirectory(prefix="modpass-gpu-") as folder:
        for name in rows:
            if time.monotonic() - start > seconds:
                row = Row(name, "failed", reason=f"no time was left after {seconds:g} s")
            else:
                row = _row(name, variants.by_name(), inputs, Path(folder), plan)
            say(_told(result, row, time.monotonic() - start))
            result = replace(result, rows=(*result.rows, row))
            keep(result)
    return result


def _row(name: str, models: Mapping[str, object], inputs: Mapping[str, Tensor], folder: Path, plan: Plan) -> Row:
    try:
        runner = _runner(name)
    except ImportError as e:
        return Row(name, "skipped", reason=no_gpu() or f"it needs the package '{e.name}', which is not installed")
    return measure(runner, models, inputs, folder, plan, lambda *_: None)  # type: ignore[arg-type]


def _runner(name: str) -> Runner:
    """A runner by name; those of torch need nothing else."""
    if name.startswith("torch"):
        graphs = {"torch-graphs-cuda", "torch-compile"}
        return TorchRunner(name, "cuda" if name.endswith("-cuda") else "cpu", name in graphs, name in graphs)
    from modpass.bench.runners import runners_named

    return runners_named([name])[0]


def _told(result: Result, row: Row, seconds: float) -> str:
    if row.ratio is None or row.dense is None or row.routed is None:
        return f"[{seconds:4.0f} s] {row.runner}: {row.status}: {row.reason}"
    dense, routed = (m.timing.median * 1e3 for m in (row.dense, row.routed))
    return (
        f"[{seconds:4.0f} s] {row.runner}: dense {dense:.4g} ms, routed {routed:.4g} ms, "
        f"{row.ratio.value:.2f}x of {result.ideal:.2f}x"
    )


def _complaints(result: Result, needed: Sequence[str]) -> list[str]:
    """What makes the whole run a failure: a row that failed, or one that torch alone should run and did not."""
    failed = [row for row in result.rows if row.status == "failed"]
    missing = [row for row in result.rows if row.runner in needed and row.status == "skipped"]
    return [f"{row.runner} was {row.status}: {row.reason}" for row in (*failed, *missing)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the JSON, and return 0 only where every row ran that can run here."""
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description="All GPU rows of the benchmark, as JSON.")
    parser.add_argument("--out", type=Path, default=Path("out/gpu.json"), help="the JSON file (default out/gpu.json)")
    parser.add_argument("--dry-run", action="store_true", help="the same path on the CPU, with tiny sizes")
    parser.add_argument("--rows", help="only these rows, with commas between")
    given = parser.parse_args(arguments)
    if not given.dry_run and (reason := no_gpu()):
        print(f"gpu.sh: {reason} that torch {torch.__version__} can use; --dry-run does without", file=sys.stderr)
        return 1
    rows = given.rows.split(",") if given.rows else DRY_ROWS if given.dry_run else ROWS
    if unknown := [name for name in rows if name not in {*ROWS, *DRY_ROWS}]:
        print(f"gpu.sh: there is no row '{unknown[0]}'; there are: {', '.join(ROWS)}", file=sys.stderr)
        return 2

    def keep(result: Result) -> None:
        with whole_file(given.out) as temporary:
            temporary.write_text(result.to_json(), encoding="utf-8")

    try:
        size, plan = (TINY, Plan(1, 3)) if given.dry_run else (REAL, Plan(5, 30))
        result = measure_gpu(size, rows, plan, keep)
    except ModpassError as e:
        print(f"gpu.sh: {e}", file=sys.stderr)
        return 1
    print(f"wrote {given.out}")
    complaints = _complaints(result, () if given.dry_run else NEEDED)
    if not any(row.status == "measured" for row in result.rows):
        complaints.append("no row was measured")
    for sentence in complaints:
        print(f"gpu.sh: {sentence}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
