"""The CPU implementation of every op: one C++ library, built at first use (`loader.py`), and a test of its invariance (`invariance.py`)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kernels.cpu.loader import implementation, load, select

__all__ = ["describe", "implementation", "load", "select", "self_test"]

OPS = ("embedding", "linear", "rmsnorm", "rope", "swiglu", "attention", "logprob", "sample")
OPS += ("router", "expert_order", "grouped_linear", "combine")


def describe(device: torch.device) -> str:
    """Every op and what computes it on this device."""
    name = "Triton" if device.type == "cuda" else {"cpp": "C++", "torch": "torch, row blocks of one shape"}[implementation()]
    return f"{', '.join(OPS[1:])}: {name}; {OPS[0]}: a copy"


def self_test(
    linear_shapes: Iterable[tuple[int, int]],
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    vocab: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    expert_shapes: Iterable[tuple[int, int, int]] = (),
    top_k: int = 1,
) -> None:
    """Check on the model's own shapes that results do not depend on the batch; ValueError if they do. See `invariance.check`."""
    from kernels.cpu.invariance import check  # the ops import this package, and the check imports the ops

    check(linear_shapes, head_dim, num_heads, num_kv_heads, vocab, torch.device(device), dtype, expert_shapes, top_k)
