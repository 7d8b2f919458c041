#!/bin/bash
set -euo pipefail
grep -q 'worker alpha' /logs/verifier/processes.txt
if grep -q 'worker beta' /logs/verifier/processes.txt; then exit 1; fi
[ "$(cat alpha/log)" = started ] && [ "$(wc -l < beta/log)" -gt 3 ] || exit 1
[ "$(tr -d ' \n' < lines.txt)" = "$(wc -l < beta/log)" ] || exit 1
