#!/bin/bash
set -euo pipefail
echo '{"server": {"host": "localhost", "port": 80, "tls": {"on": false, "cert": "a.pem"}}, "users": ["root"], "debug": true, "name": "x", "old": {"a": 1}}' > defaults.json
echo '{"server": {"port": 8443, "tls": {"on": true}}, "users": ["jane"], "debug": null, "extra": {"k": [1, {"z": null}]}, "old": 5}' > override.json
