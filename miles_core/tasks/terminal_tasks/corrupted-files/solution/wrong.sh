#!/bin/bash
set -euo pipefail
(sha256sum -c SHA256SUMS 2> /dev/null || true) | sed -n 's/^\(.*\): FAILED$/changed \1/p; s/^\(.*\): FAILED open or read$/missing \1/p' | LC_ALL=C sort > problems.txt
