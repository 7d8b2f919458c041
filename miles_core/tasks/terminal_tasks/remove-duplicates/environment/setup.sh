#!/bin/bash
set -euo pipefail
mkdir -p photos/2023 photos/2024/trip && cd photos
head -c 5000 /dev/zero | tr '\0' a > 2024/a.raw && cp 2024/a.raw 2023/z.raw && cp 2024/a.raw 2024/trip/a.raw
head -c 5000 /dev/zero | tr '\0' b > 2024/b.raw
echo short > B.txt && cp B.txt a.txt
echo trohs > 2024/trip/c.txt
: > empty1 && : > 2023/empty2
