#!/bin/bash
set -euo pipefail
printf '%s\n' '644 site/index.html' '644 site/public/img/a.png' '600 site/private/keys/id' '600 site/private/note.txt' '750 site/bin/run.sh' \
  '700 site/private/keys/rotate.sh' '750 site/public/deploy.sh' '755 site' '755 site/bin' '755 site/public' '755 site/public/img' \
  '700 site/private' '700 site/private/keys' | sort > /tmp/expected
find site -printf '%m %p\n' | sort | cmp - /tmp/expected
