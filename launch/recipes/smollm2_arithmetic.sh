#!/usr/bin/env bash
# Real GRPO on real weights, on a CPU: SmolLM2-135M-Instruct learns one-digit sums.
#
#   launch/smollm2.sh                          once: brings and converts the weights
#   launch/recipes/smollm2_arithmetic.sh       more flags are passed on
#
# Measured once, seed 0, two cores (smollm2_arithmetic.metrics.jsonl beside this file, LOG.md 2026-11-30): mean reward of steps 1-10,
# 11-20, ... 51-60: 0.40 0.89 0.93 0.96 0.97 0.97, from 0.06 at step 1. Held-out sums, never trained on: pass@1 0.158 -> 0.961.
# The log-probs of sampler and trainer were equal bits for all 17,813 trained tokens.
#
# Two ranks that do both in turn, since training costs ten times what generation does here: split ranks would leave one idle.
set -euo pipefail
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

exec "$launch/run.sh" \
  --model "${MODEL:-$launch/../models/smollm2-135m}" \
  --task arithmetic \
  --rollout-ranks-per-node 0 \
  --steps 60 \
  --prompts-per-step 4 \
  --max-context 128 \
  --lr 2e-5 \
  --micro-batch-tokens 1024 \
  --eval-prompts 20 \
  --eval-samples 4 \
  "$@"
