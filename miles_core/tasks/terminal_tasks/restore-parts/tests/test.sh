#!/bin/bash
set -euo pipefail
[ "$(sha256sum < dump.txt | cut -d ' ' -f 1)" = "$(seq 1 20000 | sed 's/$/ some line of the dump/' | sha256sum | cut -d ' ' -f 1)" ] || exit 1
