#!/usr/bin/env bash
# One torchrun line. Every argument goes to train.py.
#
#   launch/run.sh --steps 50                       2 ranks: one rolls out, one trains
#   NPROC=8 launch/run.sh --model DIR --task gsm8k --data FILE
#   MAX_RESTARTS=0 launch/run.sh ...               ends when a rank dies; by default all start again, up to 3 times, and go on
#   DRY=1 launch/run.sh ...                        prints the line instead of running it
#   TORCHRUN_ARGS="..." launch/run.sh ...          for torchrun itself, see env.sh
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/env.sh"

# TORCHRUN_ARGS is a list of words, so it stands without quotes.
line=(python "$root/launch/torchrun.py" $TORCHRUN_ARGS --max-restarts "${MAX_RESTARTS-3}" --nproc-per-node "$NPROC" "$root/train.py" "$@")
if [ "${DRY-0}" = 1 ]; then
  printf '%q ' "${line[@]}" && echo
else
  exec "${line[@]}"
fi
