"""SwiGLU without its matrices: gate / (1 + exp(-gate)) * up, with the library's own exp so that tails get the bits of the body."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.cpu.loader import load
from kernels.dispatch import dense, fast, on_triton
from kernels.swiglu import ref


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Two tensors of one shape, float32 (or bfloat16 on a GPU) -> the same shape. Backward is plain torch, in float32."""
    if fast():
        return F.silu(gate) * up
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _SwiGLU.apply(gate, up)
    return _forward(gate, up)


def _forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if on_triton(gate):
        from kernels.swiglu.triton import swiglu as triton_swiglu

        return triton_swiglu(dense(gate), dense(up))
    assert gate.shape == up.shape and gate.dtype is torch.float32 is up.dtype, (gate.shape, gate.dtype, up.shape, up.dtype)
    lib = load()
    if lib is None:
        return ref.swiglu(gate, up)
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    lib.swiglu(gate.data_ptr(), up.data_ptr(), y.data_ptr(), gate.numel())
    return y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return _forward(gate, up)

    @staticmethod
    def backward(ctx, grad):
        dtype = grad.dtype
        gate, up, grad = (t.float() for t in (*ctx.saved_tensors, grad))
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        return (grad * up * (sigmoid + silu * (1 - sigmoid))).to(dtype), (grad * silu).to(dtype)
