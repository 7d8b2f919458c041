#!/usr/bin/env bash
# The quick start with a dense policy: as wide as the experts that one token of the embedded mixture visits, warm-started in the same way.
#
#   launch/recipes/tiny_dense.sh          makes models/tiny-dense once (about a minute), then trains it; more flags are passed on
set -euo pipefail
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
model="$launch/../models/tiny-dense"

if [ ! -f "$model/config.json" ]; then
  "$launch/install.sh"
  trap 'rm -rf "$model.partial"' EXIT
  "$launch/recipes/tiny_sft.sh" --dense --out "$model.partial"
  mv -T "$model.partial" "$model"
fi
exec "$launch/run.sh" --model "$model" "$@"
