#!/bin/bash
set -euo pipefail
pkill -KILL -f 'worker beta'
sleep 0.2
wc -l < beta/log > lines.txt
