#!/bin/bash
set -euo pipefail
expected='2023/empty2
2023/z.raw
2024/b.raw
2024/trip/c.txt
B.txt'
[ "$(cd photos && find . -type f | sed 's|^\./||' | LC_ALL=C sort)" = "$expected" ] || exit 1
[ "$(cat photos/B.txt photos/2024/trip/c.txt)" = "short
trohs" ] || exit 1
[ "$(tr -d a < photos/2023/z.raw | wc -c)" = 0 ] && [ "$(wc -c < photos/2023/z.raw)" = 5000 ] && [ "$(tr -d b < photos/2024/b.raw | wc -c)" = 0 ] || exit 1
