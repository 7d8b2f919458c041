#!/bin/bash
set -euo pipefail
export GIT_AUTHOR_NAME=Dev GIT_AUTHOR_EMAIL=dev@example.com GIT_COMMITTER_NAME=Dev GIT_COMMITTER_EMAIL=dev@example.com
git init -q -b main repo && cd repo && git config user.name Agent && git config user.email agent@example.com
n=0
commit() { n=$((n + 1)); export GIT_AUTHOR_DATE="2024-01-01T00:00:$(printf %02d $n)Z" GIT_COMMITTER_DATE="2024-01-01T00:00:$(printf %02d $n)Z"; git add -A; git commit -qm "$1"; }

printf 'total=0\nfor i in $(cat numbers); do total=$((total + i)); done\n[ "$total" -lt 100 ]\n' > check.sh; echo 1 > numbers; commit 'start'
for i in $(seq 2 30); do echo $((i % 7)) >> numbers; [ $i != 19 ] || echo 60 >> numbers; [ $i != 24 ] || echo 'fix' > note; commit "change $i"; done
