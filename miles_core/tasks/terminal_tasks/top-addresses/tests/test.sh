#!/bin/bash
set -euo pipefail
printf '%s\n' '9 10.0.0.2' '5 10.0.0.10' '5 10.0.0.7' > /tmp/expected
cmp top.txt /tmp/expected
