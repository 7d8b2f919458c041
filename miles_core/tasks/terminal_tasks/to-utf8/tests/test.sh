#!/bin/bash
set -euo pipefail
printf 'caf\303\251 \342\202\254\n' | cmp - texts/a.txt
printf 'caf\303\251 \303\274ber\n' | cmp - texts/b.txt
printf 'plain\n' | cmp - texts/c.txt
printf 'na\303\257ve\r\n' | cmp - texts/d.txt
printf '\357\273\277bom \303\274\n' | cmp - texts/e.txt
[ "$(ls -A texts | wc -l)" = 5 ] || exit 1
