#!/bin/bash
set -euo pipefail
cd repo
printf '/secrets.env\n/build/\n' >> .gitignore
git rm -rq --cached secrets.env build
git add .gitignore
git commit -qm 'untrack secrets and build'
