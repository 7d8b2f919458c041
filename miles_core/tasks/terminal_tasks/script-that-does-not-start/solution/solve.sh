#!/bin/bash
set -euo pipefail
sed -i -e 's/\r$//' -e '1s|.*|#!/bin/bash|' bin/greet
chmod 755 bin/greet
