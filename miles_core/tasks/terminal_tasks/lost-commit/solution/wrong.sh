#!/bin/bash
set -euo pipefail
cd repo
git branch report "$(git reflog --format='%h %gs' | awk '/commit: draft/ {print $1; exit}')"
