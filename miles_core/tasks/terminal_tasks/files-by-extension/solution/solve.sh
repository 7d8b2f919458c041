#!/bin/bash
set -euo pipefail
cd inbox
for name in *; do
  case $name in *.*) kind=$(echo "${name##*.}" | tr A-Z a-z) ;; *) kind=none ;; esac
  mkdir -p "../sorted/$kind" && mv -- "$name" "../sorted/$kind/"
done
