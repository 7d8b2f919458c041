"""What computes an op: Triton on GPU tensors, C++ or torch on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kernels.cpu import implementation

OPS = ("embedding", "linear", "rmsnorm", "rope", "swiglu", "attention", "logprob", "sample")

_interpreted = False


def on_triton(x: torch.Tensor) -> bool:
    """Whether the Triton kernels compute ops on this tensor."""
    return x.is_cuda or _interpreted


def describe(device: torch.device) -> str:
    """Every op and what computes it on this device."""
    name = "Triton" if device.type == "cuda" else {"cpp": "C++", "torch": "torch, row blocks of one shape"}[implementation()]
    return f"{', '.join(OPS[1:])}: {name}; {OPS[0]}: a copy"


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
