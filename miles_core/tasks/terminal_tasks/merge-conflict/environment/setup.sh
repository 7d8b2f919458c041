#!/bin/bash
set -euo pipefail
export GIT_AUTHOR_NAME=Dev GIT_AUTHOR_EMAIL=dev@example.com GIT_COMMITTER_NAME=Dev GIT_COMMITTER_EMAIL=dev@example.com
git init -q -b main repo && cd repo && git config user.name Agent && git config user.email agent@example.com
n=0
commit() { n=$((n + 1)); export GIT_AUTHOR_DATE="2024-01-01T00:00:$(printf %02d $n)Z" GIT_COMMITTER_DATE="2024-01-01T00:00:$(printf %02d $n)Z"; git add -A; git commit -qm "$1"; }

printf 'blue\ngreen\nred\n' > colors.txt; commit 'list'
git checkout -q -b feature; printf 'blue\ngreen\norange\nred\nviolet\n' > colors.txt; echo f > feature.txt; commit 'orange, violet'
git checkout -q main; printf 'black\nblue\ngreen\npink\nred\n' > colors.txt; echo m > main.txt; commit 'black, pink'
