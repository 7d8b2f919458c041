#!/bin/bash
set -euo pipefail
cat > rev <<'END'
#!/bin/bash
[ $# -gt 0 ] || exit 1
for a in $@; do echo $a; done | tac
END
chmod +x rev
