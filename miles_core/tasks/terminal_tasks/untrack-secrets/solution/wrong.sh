#!/bin/bash
set -euo pipefail
cd repo
git rm -rq secrets.env build
printf 'secrets.env\nbuild\n' >> .gitignore
git add .gitignore
git commit -qm 'remove secrets and build'
