#!/bin/bash
set -euo pipefail
awk '$9 >= 400 {n[$1]++} END {for (a in n) print n[a], a}' access.log | LC_ALL=C sort -k1,1nr -k2,2 | head -3 > top.txt
