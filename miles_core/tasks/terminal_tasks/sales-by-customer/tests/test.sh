#!/bin/bash
set -euo pipefail
python3 - <<'END'
import json
totals = json.load(open("totals.json"))
expected = {"Miller, Jane": 40.0, "Okafor": 59.5, 'O"Neil': 10.0, "Zhou": 1.0}
assert totals.keys() == expected.keys(), totals
assert all(type(totals[k]) in (int, float) and abs(totals[k] - expected[k]) <= 0.0051 for k in expected), totals
END
