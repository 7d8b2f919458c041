#!/usr/bin/env bash
# The guessing game played by the OpenAI Agents SDK (pip install openai-agents), on the policy and the flags of guess.sh.
#
#   launch/recipes/openai_agents_guess.sh                    the SDK runs beside the engine
#   launch/recipes/openai_agents_guess.sh --agent http       ... in a process of its own: the rank prints the line that starts it
set -euo pipefail
recipes=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "$recipes/guess.sh" --agent "$recipes/openai_agents_guess.py:play" --serve-port 8000 "$@"
