#!/bin/bash
set -euo pipefail
cd repo
git revert --no-edit "$(git log --format=%h --grep '^tune$')"
