#!/bin/bash
set -euo pipefail
ls -lL data/* data/*/* | awk '$5 > 0 && /^-/ {print $5, $9}' | sort -rn | head -5 > report.txt
