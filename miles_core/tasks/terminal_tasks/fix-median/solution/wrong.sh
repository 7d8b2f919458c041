#!/bin/bash
set -euo pipefail
sed -i 's/(values\[middle\] + values\[middle + 1\])/(values[middle - 1] + values[middle])/' stats.py
