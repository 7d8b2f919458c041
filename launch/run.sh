#!/usr/bin/env bash
# One torchrun line. Every argument goes to train.py; `--dry` as the first one prints the line instead of running it.
#
#   launch/run.sh --steps 50                       2 ranks: one rolls out, one trains
#   NPROC=8 launch/run.sh --model DIR --task gsm8k
#   TORCHRUN_ARGS="..." launch/run.sh ...          for torchrun itself, see env.sh
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/env.sh"

dry=0
if [ "${1-}" = --dry ]; then dry=1; shift; fi

# shellcheck disable=SC2206  # TORCHRUN_ARGS is a list of words
line=(python "$root/launch/torchrun.py" $TORCHRUN_ARGS --nproc-per-node "$NPROC" "$root/train.py" "$@")
if [ $dry = 1 ]; then
  printf '%q ' "${line[@]}"
  echo
else
  exec "${line[@]}"
fi
