#!/bin/bash
set -euo pipefail
cd backup
cp dump.gz.002.retry dump.gz.002 && rm dump.gz.002.retry
cat dump.gz.??? | gunzip > ../dump.txt
