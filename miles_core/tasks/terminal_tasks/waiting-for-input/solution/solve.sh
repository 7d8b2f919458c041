#!/bin/bash
set -euo pipefail
timeout 5 bash -c 'echo "go now" > pipe'
while pgrep -x feeder > /dev/null; do sleep 0.02; done
