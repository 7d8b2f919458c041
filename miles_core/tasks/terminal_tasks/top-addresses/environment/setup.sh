#!/bin/bash
set -euo pipefail
python3 - <<'END'
rows = [("10.0.0.7", 404, 5), ("10.0.0.9", 200, 50), ("10.0.0.10", 500, 5), ("10.0.0.2", 403, 9), ("10.0.0.9", 404, 2), ("10.0.0.2", 200, 1), ("10.0.0.33", 400, 4)]
lines = [f'{a} - - [01/Mar/2024:10:{i:02}:00 +0000] "GET /p{s}/400 HTTP/1.1" {s} {400 + i}' for a, s, n in rows for i in range(n)]
open("access.log", "w").write("\n".join(sorted(lines, key=lambda line: line[::-1])) + "\n")
END
