#!/bin/bash
set -euo pipefail
cat > /tmp/run.py <<'END'
import sys
sys.path.insert(0, ".")
import stats
values = [3, 1, 2, 10]
print(stats.median(values), values, stats.median([5]), stats.median((2, 1, 3)), stats.median([1, 2]), stats.mean([1, 2, 6]))
try:
    stats.median([])
except ValueError:
    print("refused")
END
[ "$(python3 /tmp/run.py)" = "2.5 [3, 1, 2, 10] 5 2 1.5 3.0
refused" ] || exit 1
