#!/bin/bash
set -euo pipefail
awk -F, 'NR > 1 {t[$2] += $3 * $4} END {printf "{"; for (k in t) printf "%s\"%s\": %.2f", s, k, t[k], s = ", "; print "}"}' orders.csv | tr -d '"' > totals.json
