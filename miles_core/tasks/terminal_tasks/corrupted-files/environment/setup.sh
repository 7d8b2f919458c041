#!/bin/bash
set -euo pipefail
mkdir -p store/a
for name in a/1 a/2 b c 'd e'; do echo "$name" > "store/$name"; done
find store -type f | LC_ALL=C sort | while IFS= read -r path; do sha256sum "$path"; done > SHA256SUMS
echo changed > store/a/2; rm store/b; echo extra > store/a/new; printf 'd e' > 'store/d e'
