#!/bin/bash
set -euo pipefail
find data -type f -printf '%s %p\n' | sort -rn | head -5 > report.txt
