"""What computes an op: Triton on GPU tensors, C++ or torch on CPU tensors; or, with `use_fast`, torch and flash-attn where they have it.

Fast ops choose their tiles by the size of the batch: the same row has other bits in other company. They are for runs that give up parity.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch

from kernels.cpu import implementation

OPS = ("linear", "rmsnorm", "rope", "swiglu", "attention", "logprob", "sample")  # and embedding, a copy everywhere
EXPERT_OPS = ("router", "expert_order", "grouped_linear", "combine")
FLASH_DTYPE, FLASH_HEAD_DIM = torch.bfloat16, 256  # what flash-attn is used for: this dtype, heads up to this size

_interpreted = False
_fast = False


def on_triton(x: torch.Tensor) -> bool:
    """Whether the Triton kernels compute ops on this tensor."""
    return x.is_cuda or _interpreted


def use_fast(on: bool) -> None:
    """From now on in this process linear, rmsnorm, swiglu and packed attention are those of torch or flash-attn, whose results depend on
    the batch. A weight packed for the C++ kernel keeps that one, which is faster; paged attention, rope and the token rows stay ours."""
    global _fast
    _fast = on


def fast() -> bool:
    """Whether fast ops stand in for invariant ones."""
    return _fast


@cache
def has_flash_attn() -> bool:
    """Whether flash-attn is installed. It is imported when it is first called, and not before."""
    return find_spec("flash_attn") is not None


def describe(device: torch.device, dtype: torch.dtype, head_dim: int, *, experts: bool = False) -> str:
    """Every op and what computes it on this device for a model of this dtype and head size, a mixture of experts or not.

    Says so where results depend on the batch.
    """
    moe = EXPERT_OPS if experts else ()
    ours = "Triton" if device.type == "cuda" else {"cpp": "C++", "torch": "torch, row blocks of one shape"}[implementation()]
    if not _fast:
        return f"{', '.join(OPS + moe)}: {ours}; embedding: a copy"
    attention = "flash-attn" if uses_flash_attn(device, dtype, head_dim) else "torch SDPA"
    packed = "; linear of packed weights: C++" if ours == "C++" else ""
    return (
        f"linear, rmsnorm, swiglu: torch{packed}; packed attention: {attention}; "
        f"{', '.join(('paged attention', 'rope', 'logprob', 'sample', *moe))}: {ours}; "
        f"embedding: a copy; fast ops, their results depend on the batch"
    )


def uses_flash_attn(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether fast packed attention is that of flash-attn, and not torch SDPA."""
    return device.type == "cuda" and dtype is FLASH_DTYPE and head_dim <= FLASH_HEAD_DIM and has_flash_attn()


def dense(x: torch.Tensor) -> torch.Tensor:
    """The tensor as the Triton kernels take it: contiguous, at an address that is a multiple of 16 bytes. A copy only where it is not."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@contextmanager
def triton_on_cpu() -> Iterator[None]:
    """Inside, CPU tensors go to the Triton kernels too. For tests: the process must run Triton's interpreter (TRITON_INTERPRET=1)."""
    global _interpreted
    before, _interpreted = _interpreted, True
    try:
        yield
    finally:
        _interpreted = before
