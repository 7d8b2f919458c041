#!/bin/bash
set -euo pipefail
python3 - <<'END'
import json
merged = json.load(open("defaults.json"))
merged.update(json.load(open("override.json")))
json.dump({k: v for k, v in merged.items() if v is not None}, open("settings.json", "w"))
END
