#!/usr/bin/env bash
# Real GRPO on real weights, on a CPU: SmolLM2-135M-Instruct learns one-digit sums.
#
#   launch/smollm2.sh                          once: brings and converts the weights
#   launch/recipes/smollm2_arithmetic.sh       more flags are passed on
set -euo pipefail
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

exec "$launch/run.sh" \
  --model "${MODEL:-$launch/../models/smollm2-135m}" \
  --task arithmetic \
  --steps 60 \
  --prompts-per-step 8 \
  --max-context 128 \
  --lr 1e-5 \
  --micro-batch-tokens 2048 \
  --eval-prompts 20 \
  --eval-samples 4 \
  "$@"
