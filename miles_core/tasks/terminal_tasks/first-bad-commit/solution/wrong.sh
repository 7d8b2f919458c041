#!/bin/bash
set -euo pipefail
cd repo
git log --format=%H -1 --grep fix -- note > ../answer.txt
[ -s ../answer.txt ] || git log --format=%H -1 -- note > ../answer.txt
