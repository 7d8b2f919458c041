#!/bin/bash
set -euo pipefail
total=$(find cache -type f -printf '%s\n' | awk '{n += $1} END {print n}')
find cache -type f ! -name '*.pin' -printf '%T@ %s %p\n' | sort -n | while read -r _ size path; do
  [ "$total" -gt 200000 ] || break
  rm -- "$path"
  total=$((total - size))
done
