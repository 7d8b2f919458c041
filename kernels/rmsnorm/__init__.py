"""RMSNorm: x / sqrt(mean(x^2) + eps) * weight, one row at a time in a fixed order of summation. Backward is plain torch."""

from __future__ import annotations

import torch

from kernels.cpu.loader import load
from kernels.dispatch import dense, on_triton
from kernels.rmsnorm import ref


def rmsnorm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., D], [D] -> [..., D], both float32, or bfloat16 on a GPU."""
    if torch.is_grad_enabled() and (x.requires_grad or weight_D.requires_grad):
        return _RMSNorm.apply(x, weight_D, eps)
    return _forward(x, weight_D, eps)


def _forward(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    dim = x.shape[-1]
    if on_triton(x):
        from kernels.rmsnorm.triton import rmsnorm as triton_rmsnorm

        return triton_rmsnorm(dense(x.reshape(-1, dim)), weight_D, eps).view(x.shape)
    assert weight_D.shape == (dim,) and x.dtype is torch.float32 is weight_D.dtype, (x.shape, x.dtype, weight_D.shape, weight_D.dtype)
    x, weight_D = x.contiguous(), weight_D.contiguous()
    lib = load()
    if lib is None:
        return ref.rmsnorm(x.view(-1, dim), weight_D, eps).view(x.shape)
    y = torch.empty_like(x)
    lib.rmsnorm(x.data_ptr(), weight_D.data_ptr(), eps, y.data_ptr(), x.numel() // dim, dim)
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_D, eps):
        ctx.save_for_backward(x, weight_D)
        ctx.eps = eps
        return _forward(x, weight_D, eps)

    @staticmethod
    def backward(ctx, grad):
        dtype = grad.dtype
        x, weight_D, grad = (t.float() for t in (*ctx.saved_tensors, grad))
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
        normed, grad_normed = x * scale, grad * weight_D
        grad_x = scale * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
        grad_weight = (grad * normed).reshape(-1, x.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return grad_x.to(dtype), None if grad_weight is None else grad_weight.to(dtype), None
