#!/usr/bin/env bash
# A mixture of experts from real weights, on a CPU: SmolLM2-135M-Instruct, up-cycled into 4 experts a layer of which a token visits 2, learns
# one-digit sums. Its routes are recorded in rollout and replayed in training.
#
#   launch/smollm2.sh                          once: brings and converts the weights
#   launch/recipes/smollm2_mixtral.sh          more flags are passed on; needs 16 GB of memory
set -euo pipefail
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dense="${MODEL:-$launch/../models/smollm2-135m}"
mixture="$dense-mixtral-4x2"

if [ ! -f "$mixture/config.json" ]; then
  "$launch/install.sh"
  source "$launch/env.sh"
  trap 'rm -rf "$mixture.partial"' EXIT
  PYTHONPATH="$launch/.." python -m miles_core.model.upcycle "$dense" "$mixture.partial" --experts 4 --top-k 2
  mv -T "$mixture.partial" "$mixture"
fi

exec "$launch/run.sh" \
  --model "$mixture" \
  --task arithmetic \
  --rollout-ranks-per-node 0 \
  --routing-replay on \
  --steps 20 \
  --prompts-per-step 4 \
  --max-context 128 \
  --lr 2e-5 \
  --micro-batch-tokens 1024 \
  --save-every 0 \
  --eval-prompts 0 \
  "$@"
