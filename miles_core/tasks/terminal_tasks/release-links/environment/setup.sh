#!/bin/bash
set -euo pipefail
for version in 1.2.0 1.9.3 1.10.0 1.10.1-old 0.99.12; do mkdir -p app/releases/$version && echo $version > app/releases/$version/VERSION; done
rm -r app/releases/1.10.1-old && ln -s releases/1.2.0 app/current
