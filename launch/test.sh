#!/usr/bin/env bash
# Installs what is missing, then runs the tests. Arguments go to pytest: launch/test.sh tests/kernels -k attention
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/launch/install.sh"
source "$root/launch/env.sh"
cd "$root"
command -v bwrap >/dev/null || echo "test: found no bwrap: the tests of the sandbox will fail (Debian: apt-get install bubblewrap)" >&2
exec python -m pytest "$@"
