#!/bin/bash
set -euo pipefail
while [ "$(find cache -type f -printf '%s\n' | awk '{n += $1} END {print n}')" -gt 200000 ]; do
  rm -- "$(find cache -type f -printf '%T@ %p\n' | sort -n | head -1 | cut -d ' ' -f 2-)"
done
