#!/bin/bash
set -euo pipefail
export GIT_AUTHOR_NAME=Dev GIT_AUTHOR_EMAIL=dev@example.com GIT_COMMITTER_NAME=Dev GIT_COMMITTER_EMAIL=dev@example.com
git init -q -b main repo && cd repo && git config user.name Agent && git config user.email agent@example.com
n=0
commit() { n=$((n + 1)); export GIT_AUTHOR_DATE="2024-01-01T00:00:$(printf %02d $n)Z" GIT_COMMITTER_DATE="2024-01-01T00:00:$(printf %02d $n)Z"; git add -A; git commit -qm "$1"; }

printf 'retries=5\ntimeout=10\nmode=fast\n' > settings.txt; echo one > a.txt; commit 'first'
printf 'log=on\n' >> settings.txt; commit 'logging'
sed -i 's/retries=5/retries=0/' settings.txt; echo two > a.txt; commit 'tune'
echo b > b.txt; commit 'add b'
sed -i 's/log=on/log=off/' settings.txt; commit 'quiet'
git rev-parse HEAD > .git/original-head
