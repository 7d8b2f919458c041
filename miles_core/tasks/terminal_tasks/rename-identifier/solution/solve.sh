#!/bin/bash
set -euo pipefail
python3 - <<'END'
import pathlib, re
for path in [*pathlib.Path("src").rglob("*.c"), *pathlib.Path("src").rglob("*.h")]:
    text = path.read_text()
    path.write_text(re.sub(r'"[^"]*"|\bcount\b', lambda m: m[0] if m[0][0] == '"' else "total", text))
END
