#!/bin/bash
set -euo pipefail
mkdir -p project/.git project/src/.git project/B
echo h > project/.git/HEAD; echo h > project/src/.git/HEAD; echo x > project/src/x.tmp
echo b > project/B/b.txt; echo a > project/a.txt; echo s > project/src/s.py; echo g > project/.gitignore
chmod 600 project/a.txt; chmod 755 project/src/s.py; chmod 700 project/src
