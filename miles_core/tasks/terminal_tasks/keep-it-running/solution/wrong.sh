#!/bin/bash
set -euo pipefail
nohup ./server.sh state > server.log 2>&1 < /dev/null &
echo $! > server.pid
until [ -s state/heartbeat ]; do sleep 0.05; done
