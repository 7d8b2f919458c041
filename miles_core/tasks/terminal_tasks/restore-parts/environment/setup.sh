#!/bin/bash
set -euo pipefail
mkdir backup
seq 1 20000 | sed 's/$/ some line of the dump/' > /tmp/dump && gzip -9nc /tmp/dump > /tmp/dump.gz
(cd backup && split -b 5000 -a 3 --numeric-suffixes=1 /tmp/dump.gz dump.gz.)
sha256sum < /tmp/dump | cut -d ' ' -f 1 > backup/dump.sha256
cp backup/dump.gz.002 backup/dump.gz.002.retry
printf 'damage' | dd of=backup/dump.gz.002 bs=1 seek=1000 conv=notrunc 2> /dev/null
rm /tmp/dump /tmp/dump.gz
