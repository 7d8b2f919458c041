#!/bin/bash
set -euo pipefail
cd backup
cat dump.gz.??? | gunzip > ../dump.txt 2> /dev/null || true
