#!/bin/bash
set -euo pipefail
[ -L app/current ] && [ -L app/previous ] || exit 1
mv app moved
[ "$(cat moved/current/VERSION)" = 1.10.0 ] && [ "$(cat moved/previous/VERSION)" = 1.9.3 ] || exit 1
[ "$(ls moved/releases | wc -l)" = 4 ] && [ ! -e moved/releases/1.2.0/1.10.0 ] || exit 1
