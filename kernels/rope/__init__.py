"""Rotary position embedding: dimension j turns with dimension j + H / 2 ("rotate half"). Backward is the rotation by the opposite angle."""

from __future__ import annotations

import torch

from kernels.cpu.loader import load
from kernels.dispatch import dense, on_triton
from kernels.rope import ref


def rope(x_TNH: torch.Tensor, cos_TJ: torch.Tensor, sin_TJ: torch.Tensor) -> torch.Tensor:
    """[T, N, H] float32 (or bfloat16 on a GPU), cos and sin float32 [T, H / 2] (no gradient) -> [T, N, H]."""
    if torch.is_grad_enabled() and x_TNH.requires_grad:
        return _Rope.apply(x_TNH, cos_TJ, sin_TJ)
    return _rotate(x_TNH, cos_TJ, sin_TJ, False)


def _rotate(x_TNH: torch.Tensor, cos_TJ: torch.Tensor, sin_TJ: torch.Tensor, backwards: bool) -> torch.Tensor:
    num_tokens, num_heads, head_dim = x_TNH.shape
    assert cos_TJ.shape == sin_TJ.shape == (num_tokens, head_dim // 2), (x_TNH.shape, cos_TJ.shape, sin_TJ.shape)
    if on_triton(x_TNH):
        from kernels.rope.triton import rope as triton_rope

        return triton_rope(dense(x_TNH), dense(cos_TJ), dense(sin_TJ), backwards)
    assert x_TNH.dtype is torch.float32 is cos_TJ.dtype is sin_TJ.dtype, (x_TNH.dtype, cos_TJ.dtype, sin_TJ.dtype)
    lib = load()
    if lib is None:
        return ref.rope(x_TNH, cos_TJ, -sin_TJ if backwards else sin_TJ)
    x_TNH, cos_TJ, sin_TJ = x_TNH.contiguous(), cos_TJ.contiguous(), sin_TJ.contiguous()
    y_TNH = torch.empty_like(x_TNH)
    lib.rope(x_TNH.data_ptr(), cos_TJ.data_ptr(), sin_TJ.data_ptr(), y_TNH.data_ptr(), num_tokens, num_heads, head_dim, backwards)
    return y_TNH


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TNH, cos_TJ, sin_TJ):
        ctx.save_for_backward(cos_TJ, sin_TJ)
        return _rotate(x_TNH, cos_TJ, sin_TJ, False)

    @staticmethod
    def backward(ctx, grad):
        return _rotate(grad, *ctx.saved_tensors, True), None, None
