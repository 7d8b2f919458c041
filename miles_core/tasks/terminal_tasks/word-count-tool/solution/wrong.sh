#!/bin/bash
set -euo pipefail
cat > wordcount.py <<'END'
import argparse
import collections

parser = argparse.ArgumentParser()
parser.add_argument("files", nargs="+")
parser.add_argument("--top", type=int, default=10)
arguments = parser.parse_args()
counts = collections.Counter()
for name in arguments.files:
    counts.update(open(name).read().lower().split())
for word, count in counts.most_common(arguments.top):
    print(f"{word}\t{count}")
END
