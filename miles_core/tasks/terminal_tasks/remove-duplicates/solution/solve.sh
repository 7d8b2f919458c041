#!/bin/bash
set -euo pipefail
cd photos
find . -type f -print0 | sed -z 's|^\./||' | LC_ALL=C sort -z | xargs -0 sha256sum | awk 'seen[$1]++ {print substr($0, 67)}' | while IFS= read -r path; do rm -- "$path"; done
