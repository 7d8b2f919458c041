#!/bin/bash
set -euo pipefail
printf '%s\n' 'changed store/a/2' 'changed store/d e' 'extra store/a/new' 'missing store/b' | cmp - problems.txt
[ "$(cat store/a/2)" = changed ] && [ ! -e store/b ] && [ -e store/a/new ] || exit 1
