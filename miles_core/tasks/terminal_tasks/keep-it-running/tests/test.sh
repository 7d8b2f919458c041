#!/bin/bash
set -euo pipefail
pid=$(tr -d ' \n' < server.pid)
list=/logs/verifier/processes.txt
# A child that it forked and that has not become `date` yet has the same command line.
[ "$(awk -F '\t' -v pid="$pid" '$6 ~ /server\.sh state/ && $5 ~ /bash$/ && $2 != pid' $list | wc -l)" = 1 ] || exit 1
[ "$(awk -F '\t' -v pid="$pid" '$1 == pid && $3 == pid && $6 ~ /server\.sh state/' $list | wc -l)" = 1 ] || exit 1
[ "$(cat server.log)" = 'serving state' ] && [ -s state/heartbeat ] || exit 1
cmp server.sh <(printf '%s\n' '#!/bin/bash' '# Serves the directory $1.' 'echo "serving $1"' 'while :; do date +%s > "$1/heartbeat"; sleep 0.2; done')
