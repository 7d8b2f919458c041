#!/usr/bin/env bash
# Installs the pinned requirements into the active environment, or into .venv, which it makes. Does nothing once that was done.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
own=$(dirname "$here")/.venv
prefix=${VIRTUAL_ENV:-${CONDA_PREFIX:-$own}}
python=$prefix/bin/python
log=$prefix/miles-spmd-install.log
stamp=$prefix/miles-spmd-installed
say() { echo "install: $*" >&2; }
fail() { say "$*"; exit 1; }
supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; }
pip_install() { "$python" -m pip install --disable-pip-version-check "$@" >>"$log" 2>&1; }
pip_failed() { tail -n 6 "$log" >&2; fail "pip could not install $1 (everything it said: $log)"; }

wanted=$(cat "$here"/install.sh "$here"/*.txt | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then exit 0; fi

# The environment.
if [ "$prefix" = "$own" ] && [ ! -x "$python" ]; then
  for base in python3 python3.14 python3.13 python3.12 python3.11 none; do
    if supported $base; then break; fi
  done
  [ $base != none ] || fail "found no Python 3.11 to 3.14; install one, or activate an environment that has it"
  say "making .venv with $($base --version)"
  $base -m venv "$own" || fail "$base -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"
fi
supported "$python" || fail "$prefix has no Python 3.11 to 3.14; deactivate or remove it, and a new .venv will be made"
"$python" -m pip --version >/dev/null 2>&1 || fail "$prefix has no pip; run: $python -m ensurepip"
command -v g++ >/dev/null || say "found no g++: the CPU kernels will run on a slower torch path (with g++ they are built at first use)"
: >"$log"

# torch. An active environment keeps the one it has. The CPU build is asked of the index that pip is set up with, then of PyTorch's own.
constraints=()
if [ "$prefix" = "$own" ]; then constraints=(-c "$here/constraints.txt"); fi
if [ "$prefix" != "$own" ] && "$python" -c 'import torch, sys; sys.exit(torch.__version__ < (2, 11))' 2>/dev/null; then
  say "keeping the torch of $prefix"
elif nvidia-smi -L >/dev/null 2>&1; then
  say "found a CUDA device: installing torch with CUDA (several GB)"
  pip_install -c "$here/constraints-cuda.txt" "${constraints[@]}" torch || pip_failed torch
else
  say "found no CUDA device: installing torch for CPUs (200 MB)"
  cpu=(--no-deps -c "$here/constraints-cpu.txt" torch)
  if [ "$prefix" = "$own" ]; then constraints+=(-c "$here/constraints-cpu.txt"); fi
  pip_install "${cpu[@]}" || pip_install --index-url https://download.pytorch.org/whl/cpu "${cpu[@]}" || pip_failed torch
fi

say "installing the other requirements (350 MB)"
pip_install "${constraints[@]}" -r "$here/requirements.txt" || pip_failed "$here/requirements.txt"
echo "$wanted" >"$stamp"
say "done: $prefix"
