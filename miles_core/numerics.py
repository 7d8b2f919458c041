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


def choose(device: str, dtype: str, local_rank: int) -> tuple[torch.device, torch.dtype]:
    """Where this rank computes, and in what: "auto" is bfloat16 on its GPU where there are GPUs, else float32 on the CPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here (torch.cuda.is_available() is false); use --device cpu")
    if device == "cuda" and local_rank >= torch.cuda.device_count():
        raise ValueError(f"--nproc-per-node: local rank {local_rank} has no GPU of its own, this node has {torch.cuda.device_count()}")
    if device == "cpu" and dtype == "bfloat16":
        raise ValueError("--dtype bfloat16 needs a GPU: the CPU kernels compute in float32; leave --dtype at auto")
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    if device == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank), getattr(torch, dtype)
    return torch.device("cpu"), getattr(torch, dtype)


def derive_seed(seed: int, *purpose: object) -> int:
    """A 63-bit seed for one purpose of a run, equal on every rank and independent between purposes."""
    digest = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
