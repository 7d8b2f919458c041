#!/bin/bash
set -euo pipefail
cd repo
git branch report "$(git reflog --format='%h %gs' | awk '/commit: final/ {print $1; exit}')"
