#!/bin/bash
set -euo pipefail
cd repo
[ "$(git symbolic-ref --short HEAD)" = main ] && [ -z "$(git status --porcelain)" ] || exit 1
[ "$(git log -1 --format=%P | wc -w)" = 2 ] || exit 1
git merge-base --is-ancestor feature main && [ "$(git log -1 --format=%s HEAD^1)" = 'black, pink' ] || exit 1
[ "$(git show HEAD:colors.txt | tr '\n' ,)" = 'black,blue,green,orange,pink,red,violet,' ] || exit 1
[ "$(git show HEAD:feature.txt HEAD:main.txt | tr '\n' ,)" = 'f,m,' ] || exit 1
