"""Row lookup: a copy, so exact and invariant by itself. On a GPU the gradient is summed in the order of the tokens (no atomics)."""

from __future__ import annotations

import torch

from kernels.dispatch import dense, on_triton
from kernels.embedding import ref


def embedding(ids_T: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """int64 [T], [V, D] float32 (or bfloat16 on a GPU) -> [T, D]; differentiable in the weight."""
    return _Embedding.apply(ids_T, weight_VD) if on_triton(weight_VD) else ref.embedding(ids_T, weight_VD)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids_T, weight_VD):
        from kernels.embedding.triton import embedding as triton_embedding

        ctx.save_for_backward(ids_T)
        ctx.num_rows = len(weight_VD)
        return triton_embedding(ids_T, weight_VD)

    @staticmethod
    def backward(ctx, grad_TD):
        from kernels.embedding.triton import embedding_backward

        return None, embedding_backward(dense(grad_TD), ctx.saved_tensors[0], ctx.num_rows)
