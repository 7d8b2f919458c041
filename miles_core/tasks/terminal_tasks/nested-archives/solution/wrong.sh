#!/bin/bash
set -euo pipefail
mkdir plain && tar -xzf delivery.tar.gz -C plain
mv plain/data/middle.tar.gz /tmp/m && mkdir plain/data/middle.tar.gz && tar -xzf /tmp/m -C plain/data/middle.tar.gz
mv plain/data/middle.tar.gz/inner.zip /tmp/i && python3 -m zipfile -e /tmp/i plain/data/middle.tar.gz/inner.zip
