#!/usr/bin/env bash
# GSM8K word problems (arXiv 2110.14168) with Qwen3-0.6B, as a starting point: not tuned, and no result is claimed.
#
#   DATA=DIR launch/recipes/gsm8k.sh           DIR holds train.jsonl and test.jsonl (fields question, answer); more flags are passed on
#   NPROC=8 ... --rollout-ranks-per-node 6     more ranks; long answers keep more of them busy with rollout
set -euo pipefail
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

exec "$launch/run.sh" \
  --model "${MODEL:-Qwen/Qwen3-0.6B}" \
  --task gsm8k \
  --data "${DATA:?the directory that holds train.jsonl and test.jsonl}/train.jsonl" \
  --eval-data "$DATA/test.jsonl" \
  --steps 200 \
  --prompts-per-step 32 \
  --max-new-tokens 1024 \
  --max-context 2048 \
  --clip-high 0.28 \
  --lr 1e-6 \
  --warmup-steps 10 \
  --activation-checkpointing \
  "$@"
