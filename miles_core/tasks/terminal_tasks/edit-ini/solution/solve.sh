#!/bin/bash
set -euo pipefail
sed -i -e '/^\[web\]/,/^\[/ s/^port = 8080/port = 9090/' -e 's/^size = 5$/&\ntimeout = 30/' service.ini
