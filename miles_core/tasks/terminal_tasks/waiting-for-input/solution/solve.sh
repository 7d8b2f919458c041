#!/bin/bash
set -euo pipefail
timeout 5 bash -c 'echo "go now" > pipe'
sleep 0.2
