#!/bin/bash
set -euo pipefail
pkill feeder
echo 'go now' > received.txt
