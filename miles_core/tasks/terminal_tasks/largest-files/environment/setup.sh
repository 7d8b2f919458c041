#!/bin/bash
set -euo pipefail
mkdir -p data/.cache/deep data/logs "data/with space"
make() { head -c "$1" /dev/zero > "$2"; }
make 90000 data/.cache/deep/blob; make 1200 data/a; make 70001 "data/with space/big file"; make 70000 data/logs/b; make 500 data/logs/c
make 30000 data/.hidden; make 29999 data/d; make 10 data/e
ln -s /usr/bin/python3 data/link
