#!/bin/bash
set -euo pipefail
grep ' [45][0-9][0-9]' access.log | cut -d ' ' -f 1 | sort | uniq -c | sort -rn | head -3 | sed 's/^ *//' > top.txt
