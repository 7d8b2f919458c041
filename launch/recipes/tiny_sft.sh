#!/usr/bin/env bash
# The supervised warm start of the embedded policy: 240 steps of 128 demonstrations, of which 35 % are right. About a minute on one core.
#
#   launch/recipes/tiny_sft.sh                          makes models/tiny; the shipped one is seed 0
#   launch/recipes/tiny_sft.sh --out DIR --seed 1       another one; then: launch/run.sh --model DIR
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$root/launch/env.sh"

PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec python -m miles_core.assets.tiny_sft --out "$root/models/tiny" "$@"
