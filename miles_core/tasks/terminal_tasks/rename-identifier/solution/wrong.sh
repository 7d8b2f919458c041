#!/bin/bash
set -euo pipefail
find src -name '*.[ch]' -exec sed -i 's/\bcount\b/total/g' {} +
