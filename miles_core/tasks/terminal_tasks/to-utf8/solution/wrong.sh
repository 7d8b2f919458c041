#!/bin/bash
set -euo pipefail
for path in texts/*; do iconv -f ISO-8859-1 -t UTF-8 "$path" > /tmp/new && cp /tmp/new "$path"; done
