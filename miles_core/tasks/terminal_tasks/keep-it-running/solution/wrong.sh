#!/bin/bash
set -euo pipefail
nohup ./server.sh state > server.log 2>&1 < /dev/null &
echo $! > server.pid
sleep 0.5
