#!/bin/bash
set -euo pipefail
mkdir bin
printf '#!/usr/local/bin/bsh\r\nset -eu\r\nname="$1"\r\nprintf "Hello, %%s!\\n" "$name"\r\n' > bin/greet
chmod 600 bin/greet
