#!/bin/bash
set -euo pipefail
cd inbox  # upper case is another directory
for name in *; do
  case $name in *.*) kind=${name##*.} ;; *) kind=none ;; esac
  mkdir -p "../sorted/$kind" && mv -- "$name" "../sorted/$kind/"
done
