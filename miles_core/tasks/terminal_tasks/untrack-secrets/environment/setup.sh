#!/bin/bash
set -euo pipefail
export GIT_AUTHOR_NAME=Dev GIT_AUTHOR_EMAIL=dev@example.com GIT_COMMITTER_NAME=Dev GIT_COMMITTER_EMAIL=dev@example.com
git init -q -b main repo && cd repo && git config user.name Agent && git config user.email agent@example.com
n=0
commit() { n=$((n + 1)); export GIT_AUTHOR_DATE="2024-01-01T00:00:$(printf %02d $n)Z" GIT_COMMITTER_DATE="2024-01-01T00:00:$(printf %02d $n)Z"; git add -A; git commit -qm "$1"; }

mkdir -p build/x src/build; echo KEY=1 > secrets.env; echo o > build/x/a.o; echo code > src/main.c; echo doc > src/build/notes.md; echo '*.tmp' > .gitignore; commit 'all'
