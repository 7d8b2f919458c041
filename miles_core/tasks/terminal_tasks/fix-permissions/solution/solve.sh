#!/bin/bash
set -euo pipefail
chmod -R u+rwx site
find site -type d -exec chmod 755 {} +
find site -type f -exec chmod 644 {} +
find site -name '*.sh' -exec chmod 750 {} +
chmod -R u+X,go-rwx site/private
