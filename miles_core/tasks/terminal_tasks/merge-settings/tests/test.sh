#!/bin/bash
set -euo pipefail
python3 - <<'END'
import json
expected = {"server": {"host": "localhost", "port": 8443, "tls": {"on": True, "cert": "a.pem"}}, "users": ["jane"], "name": "x", "extra": {"k": [1, {"z": None}]}, "old": 5}
assert json.load(open("settings.json")) == expected
assert json.load(open("defaults.json"))["debug"] is True and json.load(open("override.json"))["debug"] is None
END
