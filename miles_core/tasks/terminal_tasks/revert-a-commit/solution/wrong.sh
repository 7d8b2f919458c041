#!/bin/bash
set -euo pipefail
cd repo
sed -i 's/retries=0/retries=5/' settings.txt
git commit -qam 'retries back to 5'
