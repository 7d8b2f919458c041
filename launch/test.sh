#!/usr/bin/env bash
# Installs what is missing, then runs the tests. Arguments go to pytest: launch/test.sh tests/kernels -k attention
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/launch/install.sh"
source "$root/launch/env.sh"
cd "$root"
command -v bwrap >/dev/null || echo "test: found no bwrap: the tests of the sandbox will fail (Debian: apt-get install bubblewrap)" >&2
[ $# -eq 0 ] || exec python -m pytest "$@"
# All of them: most use one core, so two run at a time. Those that start several ranks, or use every core themselves, go one by one.
code=0
python -m pytest -n 2 --dist loadfile tests/core tests/parity tests/e2e || code=$?
python -m pytest tests/kernels tests/dist tests/chaos tests/test_layering.py || code=$?
exit $code
