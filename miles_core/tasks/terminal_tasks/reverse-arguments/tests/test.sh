#!/bin/bash
set -euo pipefail
[ -x rev ] || exit 1
touch afile
printf '%s\n' 'last one' '' '*' '-n' 'a\nb' '  two  spaces ' | cmp - <(./rev '  two  spaces ' 'a\nb' -n '*' '' 'last one')
./rev x > /dev/null
code=0; output=$(./rev) || code=$?
[ "$code" = 1 ] && [ -z "$output" ] || exit 1
