#!/bin/bash
set -euo pipefail
python3 - <<'END'
import hashlib, pathlib
listed = {line[66:]: line[:64] for line in open("SHA256SUMS").read().splitlines()}
there = {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in pathlib.Path("store").rglob("*") if p.is_file()}
lines = [f"missing {p}" for p in listed if p not in there] + [f"extra {p}" for p in there if p not in listed]
lines += [f"changed {p}" for p in there if p in listed and there[p] != listed[p]]
open("problems.txt", "w").write("".join(line + "\n" for line in sorted(lines)))
END
