#!/bin/bash
set -euo pipefail
expected='data/middle.tar.gz/inner.zip/deep/three.txt 3
data/middle.tar.gz/inner.zip/last.tar/four.txt 4
data/middle.tar.gz/two.txt 2
data/not-a.zip.txt text
one.txt 1'
[ "$(cd plain && find . -type f | sed 's|^\./||' | LC_ALL=C sort | while read -r path; do echo "$path $(cat "$path")"; done)" = "$expected" ] || exit 1
