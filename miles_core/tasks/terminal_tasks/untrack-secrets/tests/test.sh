#!/bin/bash
set -euo pipefail
cd repo
[ "$(git rev-list --count HEAD)" = 2 ] && [ -z "$(git status --porcelain)" ] || exit 1
[ "$(git ls-files | LC_ALL=C sort | tr '\n' ,)" = '.gitignore,src/build/notes.md,src/main.c,' ] || exit 1
[ "$(cat secrets.env build/x/a.o | tr '\n' ,)" = 'KEY=1,o,' ] || exit 1
echo new > build/new; echo t > x.tmp; [ -z "$(git status --porcelain)" ] || exit 1
echo new > src/build/new.md; [ "$(git status --porcelain)" = '?? src/build/new.md' ] || exit 1
