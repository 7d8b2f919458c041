#!/bin/bash
set -euo pipefail
cd photos  # compares sizes, not contents
seen=
find . -type f | sed 's|^\./||' | LC_ALL=C sort | while IFS= read -r path; do
  size=$(wc -c < "$path")
  case " $seen " in *" $size "*) rm -- "$path" ;; *) seen="$seen $size" ;; esac
done
