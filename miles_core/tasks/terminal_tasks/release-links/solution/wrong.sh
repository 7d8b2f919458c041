#!/bin/bash
set -euo pipefail
cd app
ln -sfn releases/$(ls releases | sort | tail -1) current
ln -sfn releases/$(ls releases | sort | tail -2 | head -1) previous
