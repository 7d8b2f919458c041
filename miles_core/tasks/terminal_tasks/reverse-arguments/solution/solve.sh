#!/bin/bash
set -euo pipefail
cat > rev <<'END'
#!/bin/bash
[ $# -gt 0 ] || exit 1
for ((i = $#; i > 0; i--)); do printf '%s\n' "${!i}"; done
END
chmod +x rev
