#!/bin/bash
set -euo pipefail
read -r sum pid < received.txt
[ "$sum" = "$(printf 'go now' | sha256sum | cut -c 1-12)" ] || exit 1
if grep -q feeder /logs/verifier/processes.txt; then exit 1; fi
[ -p pipe ] && [ "$pid" -gt 1 ] || exit 1
