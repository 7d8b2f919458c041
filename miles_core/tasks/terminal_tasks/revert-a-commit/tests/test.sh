#!/bin/bash
set -euo pipefail
cd repo
[ "$(git symbolic-ref --short HEAD)" = main ] && [ -z "$(git status --porcelain)" ] || exit 1
[ "$(git log --format=%s | tail -5 | tr '\n' ,)" = 'quiet,add b,tune,logging,first,' ] || exit 1
[ "$(git rev-list --count HEAD)" = 6 ] || exit 1
[ "$(git show HEAD:settings.txt | tr '\n' ,)" = 'retries=5,timeout=10,mode=fast,log=off,' ] || exit 1
[ "$(git show HEAD:a.txt)" = one ] && [ "$(git show HEAD:b.txt)" = b ] || exit 1
