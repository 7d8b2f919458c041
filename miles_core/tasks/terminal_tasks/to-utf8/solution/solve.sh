#!/bin/bash
set -euo pipefail
for path in texts/*; do
  iconv -f UTF-8 -t UTF-8 "$path" > /dev/null 2>&1 || { iconv -f ISO-8859-1 -t UTF-8 "$path" > /tmp/new && cp /tmp/new "$path"; }
done
