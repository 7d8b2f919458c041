#!/bin/bash
set -euo pipefail
[ "$(head -c 2 bin/greet)" = '#!' ] && head -1 bin/greet | grep -q bash || exit 1
[ "$(./bin/greet World)" = 'Hello, World!' ] && [ "$(./bin/greet 'a  b')" = 'Hello, a  b!' ] || exit 1
if grep -q $'\r' bin/greet; then exit 1; fi
if ./bin/greet 2> /dev/null; then exit 1; fi
