#!/bin/bash
set -euo pipefail
printf '%s\n' '90000 data/.cache/deep/blob' '70001 data/with space/big file' '70000 data/logs/b' '30000 data/.hidden' '29999 data/d' > /tmp/expected
cmp report.txt /tmp/expected
