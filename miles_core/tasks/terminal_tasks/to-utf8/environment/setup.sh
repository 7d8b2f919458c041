#!/bin/bash
set -euo pipefail
mkdir texts
printf 'caf\303\251 \342\202\254\n' > texts/a.txt
printf 'caf\351 \374ber\n' > texts/b.txt
printf 'plain\n' > texts/c.txt
printf 'na\357ve\r\n' > texts/d.txt
printf '\357\273\277bom \303\274\n' > texts/e.txt
