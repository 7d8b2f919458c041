#!/bin/bash
set -euo pipefail
cat > service.ini <<'END'
# ports below 1024 need root
[admin]
port = 8000

[web]
; port = 1
host = 0.0.0.0
port = 8080   ; public

[queue]
size = 5

[log]
port = 8080
END
