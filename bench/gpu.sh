#!/usr/bin/env bash
# All GPU rows of the benchmark in under 8 minutes, from a plain checkout: bench/gpu.sh [--out FILE] [--dry-run]
# PYTHON names the interpreter; nothing is installed or downloaded.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
limit=470
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1

"$python" - <<'CHECK'
import importlib.util, sys

def absent(names):
    return [name for name in names if importlib.util.find_spec(name) is None]

if missing := absent(["torch", "numpy", "safetensors"]):
    sys.exit(f"gpu.sh: {sys.executable} lacks {', '.join(missing)}; every row needs them: pip install {' '.join(missing)}")
import torch
if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 9):
    sys.exit(f"gpu.sh: torch {torch.__version__} is installed, and 2.9 or newer is needed")
if missing := absent(["onnx", "onnx_ir", "onnxscript", "onnxruntime"]):
    print(f"gpu.sh: without {', '.join(missing)} only the rows of torch can run", file=sys.stderr)
CHECK

status=0
timeout --signal=INT --kill-after=10 "$limit" "$python" -m modpass.bench.gpu "$@" || status=$?
if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
    echo "gpu.sh: stopped after $limit s; the rows that were measured until then are written" >&2
fi
exit "$status"
