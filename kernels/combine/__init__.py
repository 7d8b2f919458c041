"""The weighted sum of what a token's experts gave, taken from the order of the experts back to that of the tokens.

Legend: T tokens, K slots, M = T * K rows in the order of their experts, N columns.
"""

from __future__ import annotations

import torch

from kernels.combine import ref
from kernels.cpu.loader import load
from kernels.dispatch import dense, on_triton


def combine(y_MN: torch.Tensor, weights_TK: torch.Tensor, place_TK: torch.Tensor) -> torch.Tensor:
    """[M, N] float32 (or bfloat16 on a GPU), float32 [T, K], int64 [T, K] -> [T, N] in the dtype of y; differentiable in y and the weights.

    out[t] is one float32 chain over the slots in order: y[place[t, 0]] * w[t, 0], then fma(y[place[t, k]], w[t, k], sum), rounded once.
    `place` is a permutation (see expert_order). Backward is plain torch: products, and one sum over N for each weight.
    """
    if torch.is_grad_enabled() and (y_MN.requires_grad or weights_TK.requires_grad):
        return _Combine.apply(y_MN, weights_TK, place_TK)
    return _forward(y_MN, weights_TK, place_TK)


def _forward(y_MN: torch.Tensor, weights_TK: torch.Tensor, place_TK: torch.Tensor) -> torch.Tensor:
    if on_triton(y_MN):
        from kernels.combine.triton import combine as triton_combine

        return triton_combine(dense(y_MN), dense(weights_TK), dense(place_TK))
    (num_tokens, top_k), (num_rows, dim) = place_TK.shape, y_MN.shape
    fits = weights_TK.shape == place_TK.shape and top_k > 0 and num_rows == num_tokens * top_k
    assert fits, (y_MN.shape, weights_TK.shape, place_TK.shape)
    assert y_MN.dtype is torch.float32 is weights_TK.dtype and place_TK.dtype is torch.int64, (y_MN.dtype, weights_TK.dtype, place_TK.dtype)
    lib = load()
    if lib is None:
        return ref.combine(y_MN, weights_TK, place_TK)
    y, weights, place = y_MN.contiguous(), weights_TK.contiguous(), place_TK.contiguous()
    out_TN = y.new_empty(num_tokens, dim)
    bad = lib.combine(y.data_ptr(), weights.data_ptr(), place.data_ptr(), out_TN.data_ptr(), num_tokens, top_k, dim)
    assert bad < 0, f"combine: token {bad} has places {place[bad].tolist()} among {num_rows} rows"
    return out_TN


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_MN, weights_TK, place_TK):
        ctx.save_for_backward(y_MN, weights_TK, place_TK)
        return _forward(y_MN, weights_TK, place_TK)

    @staticmethod
    def backward(ctx, grad_TN):
        y_MN, weights_TK, place_TK = ctx.saved_tensors
        need_y, need_weights, _ = ctx.needs_input_grad
        grad_T1N = grad_TN.float()[:, None]
        y_grad = weights_grad = None
        if need_y:
            y_grad = torch.empty_like(y_MN)
            y_grad[place_TK.view(-1)] = (grad_T1N * weights_TK[..., None]).view_as(y_MN).to(y_MN.dtype)  # one writer for each row
        if need_weights:
            weights_grad = (grad_T1N * y_MN[place_TK]).sum(-1)
        return y_grad, weights_grad, None
