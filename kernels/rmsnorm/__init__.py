"""RMSNorm: x / sqrt(mean(x^2) + eps) * weight, one row at a time in a fixed order of summation; alone, or of x + residual in one pass.

Backward is plain torch, in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.cpu.loader import load
from kernels.dispatch import dense, fast, on_triton
from kernels.rmsnorm import ref


def rmsnorm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., D], [D] -> [..., D], both float32, or bfloat16 on a GPU."""
    if fast():
        return F.rms_norm(x, weight_D.shape, weight_D, eps)
    if torch.is_grad_enabled() and (x.requires_grad or weight_D.requires_grad):
        return _RMSNorm.apply(x, weight_D, eps)
    return _forward(x, weight_D, eps)


def rmsnorm_residual(x: torch.Tensor, residual: torch.Tensor, weight_D: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., D], [..., D], [D] -> (rmsnorm(x + residual), x + residual), the dtypes of `rmsnorm`, the bits of doing one after the other.

    The sum is rounded to its dtype before it is normed, because that rounded sum is what the next layer adds to.
    """
    if fast():
        total = x + residual
        return rmsnorm(total, weight_D, eps), total
    if torch.is_grad_enabled() and (x.requires_grad or residual.requires_grad or weight_D.requires_grad):
        return _RMSNormResidual.apply(x, residual, weight_D, eps)
    return _forward_residual(x, residual, weight_D, eps)


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


def _forward_residual(x: torch.Tensor, residual: torch.Tensor, weight_D: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    shape = x.shape
    dim = shape[-1]
    assert residual.shape == shape, (shape, residual.shape)
    if on_triton(x):
        from kernels.rmsnorm.triton import rmsnorm_residual as triton_rmsnorm_residual

        y, total = triton_rmsnorm_residual(*(dense(t.reshape(-1, dim)) for t in (x, residual)), weight_D, eps)
        return y.view(shape), total.view(shape)
    assert weight_D.shape == (dim,) and x.dtype is residual.dtype is torch.float32 is weight_D.dtype, (shape, x.dtype, weight_D.shape)
    x, residual, weight_D = x.contiguous(), residual.contiguous(), weight_D.contiguous()
    lib = load()
    if lib is None:
        y, total = ref.rmsnorm_residual(x.view(-1, dim), residual.view(-1, dim), weight_D, eps)
        return y.view(shape), total.view(shape)
    y, total = torch.empty_like(x), torch.empty_like(x)
    pointers = (x.data_ptr(), residual.data_ptr(), weight_D.data_ptr(), eps, y.data_ptr(), total.data_ptr())
    lib.rmsnorm_residual(*pointers, x.numel() // dim, dim)
    return y, total


def _backward(ctx, x, weight_D, grad, need_weight):
    """Gradients of (x, weight or None), in the dtype of `grad`."""
    dtype = grad.dtype
    x, weight_D, grad = x.float(), weight_D.float(), grad.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
    normed, grad_normed = x * scale, grad * weight_D
    grad_x = scale * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
    return grad_x.to(dtype), (grad * normed).reshape(-1, x.shape[-1]).sum(0).to(dtype) if need_weight else None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_D, eps):
        ctx.save_for_backward(x, weight_D)
        ctx.eps = eps
        return _forward(x, weight_D, eps)

    @staticmethod
    def backward(ctx, grad):
        return *_backward(ctx, *ctx.saved_tensors, grad, ctx.needs_input_grad[1]), None


class _RMSNormResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight_D, eps):
        y, total = _forward_residual(x, residual, weight_D, eps)
        ctx.save_for_backward(total, weight_D)
        ctx.eps = eps
        return y, total

    @staticmethod
    def backward(ctx, grad, grad_total):
        grad_x, grad_weight = _backward(ctx, *ctx.saved_tensors, grad, ctx.needs_input_grad[2])
        grad_x = grad_x + grad_total
        return grad_x, grad_x, grad_weight, None
