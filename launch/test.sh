#!/usr/bin/env bash
# Installs what is missing, then runs the tests. Arguments go to pytest: launch/test.sh tests/kernels -k attention
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/launch/install.sh"
source "$root/launch/env.sh"
cd "$root"
exec python -m pytest "$@"
