#!/bin/bash
set -euo pipefail
cat > wordcount.py <<'END'
import argparse
import collections
import re
import sys

parser = argparse.ArgumentParser()
parser.add_argument("files", nargs="+")
parser.add_argument("--top", type=int, default=10)
arguments = parser.parse_args()
counts = collections.Counter()
for name in arguments.files:
    try:
        text = open(name).read()
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    counts.update(re.findall(r"[^\W\d_]+", text.lower()))
for word, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: arguments.top]:
    print(f"{word}\t{count}")
END
