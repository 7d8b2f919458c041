# Sourced by run.sh and test.sh: every environment variable that a run depends on, and why.
# What you have set already is kept.

# Threads. One OpenMP thread a rank: two threads on two busy cores cost a time slice per op (0.3 ms becomes 16 ms).
export OMP_NUM_THREADS="${OMP_NUM_THREADS-1}"
# The tokenizer's own thread pool is no use on short prompts, and warns when a reward process is forked after it.
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM-false}"

# Imports. `kernels` is also the name of a Hugging Face package that transformers would use, finding our folder in its place.
export USE_HUB_KERNELS="${USE_HUB_KERNELS-0}"

# Output. Lines appear when they are printed, also through a pipe or in a SLURM log.
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED-1}"

# torch's C++ warns of every lost connection with a stack of 30 lines; the ranks say themselves what they have lost.
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL-ERROR}"

# Ranks on each node.
NPROC="${NPROC-2}"
# With more threads than cores a waiting OpenMP thread sleeps: spinning would take the core from the rank it waits for. Else it spins,
# which makes two threads a tenth faster.
if [ $((NPROC * ${OMP_NUM_THREADS%%,*})) -gt "$(env -u OMP_NUM_THREADS nproc)" ]; then export OMP_WAIT_POLICY="${OMP_WAIT_POLICY-PASSIVE}"; fi
# How the ranks find each other, and anything else for torchrun. The default is one node: a free port on
# loopback, so that two runs never meet and the host's name need not resolve. slurm.sbatch sets it for several nodes.
if [ -z "${TORCHRUN_ARGS-}" ]; then
  TORCHRUN_ARGS="--standalone --local-addr localhost"
  # gloo binds to the address of the host's name, which a laptop or a VPN often gets wrong.
  export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME-lo}"
fi

# The interpreter of the active environment, or of the .venv that install.sh made.
_bin="${VIRTUAL_ENV:-${CONDA_PREFIX:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv}}/bin"
if [ -x "$_bin/python" ]; then export PATH="$_bin:$PATH"; fi
