#!/bin/bash
set -euo pipefail
mkdir alpha beta
cat > worker <<'END'
#!/bin/bash
trap '' TERM
echo started > "$1/log"
[ ! -e "$1/noisy" ] && exec -a "worker $1" sleep 100000
rm "$1/noisy"
while :; do echo line >> "$1/log"; sleep 0.05; done
END
chmod +x worker; touch beta/noisy
for d in alpha beta; do setsid ./worker $d > /dev/null 2>&1 < /dev/null & done
until [ -s alpha/log ] && [ -s beta/log ] && [ "$(wc -l < beta/log)" -gt 3 ]; do sleep 0.02; done
