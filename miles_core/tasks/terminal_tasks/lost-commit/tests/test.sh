#!/bin/bash
set -euo pipefail
cd repo
[ "$(git for-each-ref --format='%(refname:short)' refs/heads | tr '\n' ,)" = 'main,other,report,' ] || exit 1
[ "$(git log --format=%s report | tr '\n' ,)" = 'final,draft,base,' ] || exit 1
[ "$(git show report:report.txt)" = final ] && [ "$(git log -1 --format=%ad --date=format:%Y-%m-%d report)" = 2024-01-01 ] || exit 1
[ "$(git log -1 --format=%an report)" = Dev ] && [ "$(git log -1 --format=%s main)" = more ] && [ "$(git log -1 --format=%s other)" = other ] || exit 1
