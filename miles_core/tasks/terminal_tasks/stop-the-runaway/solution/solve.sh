#!/bin/bash
set -euo pipefail
pkill -KILL -f 'worker beta'
while pgrep -f 'worker beta' > /dev/null; do sleep 0.02; done
wc -l < beta/log > lines.txt
