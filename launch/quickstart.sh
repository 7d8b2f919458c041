#!/usr/bin/env bash
# From a fresh clone to a policy that learns: installs what is missing, then trains the embedded policy on two ranks of this
# machine. Arguments go to train.py (`--help` lists them).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
"$here/install.sh"
exec "$here/run.sh" "$@"
