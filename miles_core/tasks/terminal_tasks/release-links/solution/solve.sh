#!/bin/bash
set -euo pipefail
cd app
ln -sfn releases/1.10.0 current
ln -sfn releases/1.9.3 previous
