"""Seeds, determinism, dtype policy and memory policy, set once per process.

On CPUs everything is float32. Every random choice of a run is a function of (run seed, purpose, index): no global generator is shared.
"""

from __future__ import annotations

import ctypes
import hashlib
import os

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_NEVER = (1 << 31) - 1  # bytes


def setup() -> None:
    """Deterministic algorithms only, and as many threads as OMP_NUM_THREADS says (one if unset: see launch/env.sh)."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    torch.use_deterministic_algorithms(True)
    # That mode also fills every new tensor with NaN, a debugging aid that costs a write of each; the tests of the kernels do it themselves.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.matmul.allow_tf32 = False
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Let malloc keep what is freed. By default glibc returns every large tensor to the system, and each use of new memory costs a page
    fault every 4 KiB: a third of a training step on a CPU. Without effect where the C library has no mallopt."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(option, _NEVER)


def derive_seed(seed: int, *purpose: object) -> int:
    """A 63-bit seed for one purpose of a run, equal on every rank and independent between purposes."""
    digest = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
