#!/bin/bash
set -euo pipefail
LC_ALL=C tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --exclude=.git --exclude='*.tmp' -cf project.tar project
