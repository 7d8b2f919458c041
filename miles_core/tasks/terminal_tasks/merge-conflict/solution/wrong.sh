#!/bin/bash
set -euo pipefail
cd repo
git merge -q -X theirs -m 'merge feature' feature
