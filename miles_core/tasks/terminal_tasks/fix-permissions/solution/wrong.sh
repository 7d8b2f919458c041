#!/bin/bash
set -euo pipefail
chmod -R 755 site
find site -type f -exec chmod 644 {} +
find site -name '*.sh' -exec chmod 750 {} +
chmod 700 site/private
