#!/bin/bash
set -euo pipefail
mkdir -p cache/sub
make() { head -c "$1" /dev/zero > "cache/$2"; touch -d "2024-01-$3" "cache/$2"; }
make 50000 old.pin 01; make 60000 'a file' 02; make 40000 sub/b 03; make 30000 sub/c 04; make 70000 d 05; make 90000 e 06
