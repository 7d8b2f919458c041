#!/bin/bash
set -euo pipefail
printf 'The cat and the dog.\nThe end, and THE rest\n' > sample.txt
