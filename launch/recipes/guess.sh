#!/usr/bin/env bash
# Several turns, on a CPU: a small policy learns to find a number between 1 and 64 in six guesses, told "higher" or "lower" after each.
#
#   launch/recipes/guess.sh          makes models/guess once (a supervised warm start, about a minute), then trains it; more flags are passed on
set -euo pipefail
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
model="$launch/../models/guess"

if [ ! -f "$model/config.json" ]; then
  "$launch/install.sh"
  trap 'rm -rf "$model.partial"' EXIT
  "$launch/recipes/tiny_sft.sh" --task guess --dense --out "$model.partial"
  mv -T "$model.partial" "$model"
fi
exec "$launch/run.sh" \
  --model "$model" \
  --task guess \
  --max-turns 6 \
  --max-new-tokens 6 \
  --max-context 256 \
  --eval-prompts 64 \
  --eval-samples 4 \
  "$@"
