#!/usr/bin/env bash
# Everything that needs a GPU, in one command: the gpu tests (row and batch sweeps of the kernels, a strict run), the price of invariance, and
# the start-up check of a run on all GPUs of this node. Prints what belongs into LOG.md.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
nvidia-smi -L >/dev/null 2>&1 || { echo "gpu_check: nvidia-smi finds no GPU here" >&2; exit 2; }
"$here/install.sh"
source "$here/env.sh"
cd "$here/.."
echo "### $(nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | xargs), torch $(python -c 'import torch; print(torch.__version__)')," \
  "triton $(python -c 'import triton; print(triton.__version__)'), $(git rev-parse --short HEAD 2>/dev/null || echo no git)"
python -m pytest -q -m gpu
python -m kernels.bench --device cuda
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
NPROC=$(nvidia-smi -L | wc -l) "$here/run.sh" --rollout-ranks-per-node 0 --steps 5 --run-dir "$run/run" "$@"
