#!/bin/bash
set -euo pipefail
[ "$(cd cache && find . -type f -printf '%P %s\n' | LC_ALL=C sort | tr '\n' ,)" = 'e 90000,old.pin 50000,' ] || exit 1
