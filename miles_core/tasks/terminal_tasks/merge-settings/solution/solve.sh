#!/bin/bash
set -euo pipefail
python3 - <<'END'
import json
def merge(a, b):
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return b
    merged = {**a, **{k: merge(a[k], v) if k in a else v for k, v in b.items()}}
    return {k: v for k, v in merged.items() if not (k in b and b[k] is None)}
json.dump(merge(json.load(open("defaults.json")), json.load(open("override.json"))), open("settings.json", "w"))
END
