#!/bin/bash
set -euo pipefail
setsid bash -c 'echo $$ > server.pid; exec ./server.sh state' > server.log 2>&1 < /dev/null &
disown
until [ -s state/heartbeat ]; do sleep 0.05; done
