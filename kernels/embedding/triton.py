"""Row lookup on the GPU, and the gradient of its weight without atomics: the tokens of a row are added in their order, by one program.

The gradient sorts the ids (a stable sort, so equal ids stay in token order). The program at the first token of a run of equal ids adds up
the whole run in float32 and writes the row once; all others leave at once. Rows that no token uses are 0.

Legend: T tokens, V rows, D columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.tiles import DTYPES, Spec, Tile, arch_of, check, require, tile

SUPPORTED = "ids int64 [T], weight [V, D] bfloat16 or float32, D at least 1"
SUPPORTED_BACKWARD = "grad [T, D] bfloat16 or float32, ids int64 [T], V at least 1"


@triton.jit(do_not_specialize=["V"])
def _embedding(ids_ptr, weight_ptr, y_ptr, V, D: tl.constexpr, BLOCK_D: tl.constexpr):
    t, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.load(ids_ptr + t)
    inside = (row >= 0) & (row < V)
    # An id outside of the weight reads nothing and gives NaN, which is seen further on, rather than what stands at that address.
    y_D = tl.load(weight_ptr + row * D + d, mask=inside & (d < D), other=float("nan"))
    tl.store(y_ptr + t * D + d, y_D, mask=d < D)


@triton.jit(do_not_specialize=["V"])
def _embedding_backward(
    grad_ptr,
    sorted_ptr,
    order_ptr,
    ends_ptr,
    weight_grad_ptr,
    V,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    start, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.load(sorted_ptr + start)
    before = tl.load(sorted_ptr + start - 1, mask=start > 0, other=-1)
    if (row != before) & (row >= 0) & (row < V):
        end = tl.load(ends_ptr + start)
        total_D = tl.zeros((BLOCK_D,), tl.float32)
        for first in range(start, end, BLOCK_T):
            place = first + tl.arange(0, BLOCK_T)
            token_T = tl.load(order_ptr + place, mask=place < end, other=0)
            mask = (place < end)[:, None] & (d < D)[None, :]
            grad_TD = tl.load(grad_ptr + token_T[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
            total_D += tl.sum(grad_TD, 0)
        tl.store(weight_grad_ptr + row * D + d, total_D.to(weight_grad_ptr.dtype.element_ty), mask=d < D)


def _constants(dim: int, t: Tile) -> dict[str, Any]:
    return {"D": dim, "BLOCK_D": t.block_n}


@torch.library.custom_op("miles_spmd::embedding", mutates_args=())
def embedding(ids_T: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """int64 [T], [V, D] -> [T, D]. An id outside of 0 .. V - 1 gives a row of NaN."""
    y_TD = _rows(ids_T, weight_VD)
    check("embedding", ids_T, weight_VD)
    num_tokens, dim = y_TD.shape
    t = tile("embedding", y_TD.dtype, 1, dim, arch_of(y_TD))
    if num_tokens:
        grid = (num_tokens, triton.cdiv(dim, t.block_n))
        _embedding[grid](ids_T, weight_VD, y_TD, len(weight_VD), **_constants(dim, t), num_warps=t.warps, num_stages=t.stages)
    return y_TD


@embedding.register_fake
def _rows(ids_T: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    fits = ids_T.ndim == 1 and ids_T.dtype is torch.int64 and weight_VD.ndim == 2 and weight_VD.shape[1] > 0
    require("embedding", fits and weight_VD.dtype in DTYPES, SUPPORTED, ids_T, weight_VD)
    return weight_VD.new_empty(ids_T.shape[0], weight_VD.shape[1])


@torch.library.custom_op("miles_spmd::embedding_backward", mutates_args=())
def embedding_backward(grad_TD: torch.Tensor, ids_T: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[T, D], int64 [T] -> [num_rows, D] in the dtype of grad: each row the sum over the tokens that looked it up."""
    weight_grad_VD = _weight_grad(grad_TD, ids_T, num_rows).zero_()
    check("embedding_backward", grad_TD, ids_T)
    num_tokens, dim = grad_TD.shape
    t = tile("embedding", grad_TD.dtype, 1, dim, arch_of(grad_TD))
    if num_tokens:
        sorted_T, order_T = torch.sort(ids_T, stable=True)
        ends_T = torch.searchsorted(sorted_T, sorted_T, right=True)  # of the run that a token is in
        grid = (num_tokens, triton.cdiv(dim, t.block_n))
        arguments = (grad_TD, sorted_T, order_T, ends_T, weight_grad_VD, num_rows)
        constants = {**_constants(dim, t), "BLOCK_T": t.block_k}
        _embedding_backward[grid](*arguments, **constants, num_warps=t.warps, num_stages=t.stages)
    return weight_grad_VD


@embedding_backward.register_fake
def _weight_grad(grad_TD: torch.Tensor, ids_T: torch.Tensor, num_rows: int) -> torch.Tensor:
    fits = grad_TD.ndim == 2 and ids_T.shape == grad_TD.shape[:1] and grad_TD.shape[1] > 0 and num_rows > 0
    require("embedding_backward", fits and ids_T.dtype is torch.int64 and grad_TD.dtype in DTYPES, SUPPORTED_BACKWARD, grad_TD, ids_T)
    return grad_TD.new_empty(num_rows, grad_TD.shape[1])


def specs(dtype: torch.dtype, arch: str) -> list[Spec]:
    """Both directions for a large model, and the gradient for a width that divides nothing."""
    variants = []
    for kernel, dim in ((_embedding, 4096), (_embedding_backward, 4096), (_embedding_backward, 100)):
        t = tile("embedding", dtype, 1, dim, arch)
        values, ids = "*" + DTYPES[dtype], "*i64"
        if kernel is _embedding:
            pointers, constants = {"ids_ptr": ids, "weight_ptr": values, "y_ptr": values}, {"D": dim, "BLOCK_D": t.block_n}
        else:
            names = ("sorted_ptr", "order_ptr", "ends_ptr")
            pointers = {"grad_ptr": values, **dict.fromkeys(names, ids), "weight_grad_ptr": values}
            constants = {"D": dim, "BLOCK_T": t.block_k, "BLOCK_D": t.block_n}
        signature = {**pointers, "V": "i32", **dict.fromkeys(constants, "constexpr")}
        label = f"[T], [V, {dim}]" if kernel is _embedding else f"backward [T, {dim}]"
        variants.append(Spec(label, kernel, signature, constants, t.warps, t.stages, dtype))
    return variants
