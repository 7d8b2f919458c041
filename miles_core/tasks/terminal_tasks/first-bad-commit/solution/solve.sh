#!/bin/bash
set -euo pipefail
cd repo
git bisect start main "$(git rev-list --max-parents=0 main)" > /dev/null
git bisect run sh check.sh > /dev/null
git rev-parse refs/bisect/bad > ../answer.txt
git bisect reset > /dev/null 2>&1
