#!/bin/bash
set -euo pipefail
[ "$(git -C repo symbolic-ref --short HEAD)" = main ] && [ -z "$(git -C repo status --porcelain)" ] || exit 1
[ "$(git -C repo rev-list --count main)" = 30 ] || exit 1
answer=$(tr -d ' \n' < answer.txt)
[ "${#answer}" = 40 ] && [ "$(git -C repo log -1 --format=%s "$answer")" = 'change 19' ] || exit 1
