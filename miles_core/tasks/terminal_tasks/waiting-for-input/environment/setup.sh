#!/bin/bash
set -euo pipefail
mkfifo pipe
cat > feeder <<'END'
#!/bin/bash
IFS= read -r line < pipe
printf '%s %s\n' "$(printf '%s' "$line" | sha256sum | cut -c 1-12)" "$$" > received.txt
END
chmod +x feeder
setsid ./feeder > /dev/null 2>&1 < /dev/null &
until pgrep -x feeder > /dev/null; do sleep 0.02; done
