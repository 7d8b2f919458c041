#!/bin/bash
set -euo pipefail
cd repo
git merge feature > /dev/null || true
printf '%s\n' black blue green orange pink red violet > colors.txt
git add colors.txt
git commit -qm 'merge feature'
