"""The weighted sum of a token's experts on the GPU: one float32 chain over the slots in order, rounded once.

Legend: T tokens, K slots, M = T * K rows in the order of their experts, N columns; capitals as suffixes are the block's share of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.tiles import DTYPES, Spec, Tile, arch_of, check, require, tile

SUPPORTED = "y [T * K, N] bfloat16 or float32, weights float32 [T, K], place int64 [T, K], K and N at least 1"


@triton.jit
def _slot(y_ptr, weights_ptr, place_ptr, slot_T, n, inside_T, N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows of one slot of each token, and their weights."""
    row_T = tl.load(place_ptr + slot_T, mask=inside_T, other=0)
    weight_T = tl.load(weights_ptr + slot_T, mask=inside_T, other=0.0)
    y_TN = tl.load(y_ptr + row_T[:, None] * N + n[None, :], mask=inside_T[:, None] & (n < N)[None, :], other=0.0)
    return y_TN.to(tl.float32), weight_T[:, None] + tl.zeros((BLOCK_T, BLOCK_N), tl.float32)


@triton.jit(do_not_specialize=["T"])
def _combine(y_ptr, weights_ptr, place_ptr, out_ptr, T, N: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    blocks_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    t = tl.program_id(0) // blocks_n * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(0) % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    slot_T = t.to(tl.int64) * K
    y_TN, weight_TN = _slot(y_ptr, weights_ptr, place_ptr, slot_T, n, t < T, N, BLOCK_T, BLOCK_N)
    total_TN = y_TN * weight_TN
    for k in range(1, K):
        y_TN, weight_TN = _slot(y_ptr, weights_ptr, place_ptr, slot_T + k, n, t < T, N, BLOCK_T, BLOCK_N)
        total_TN = tl.fma(y_TN, weight_TN, total_TN)
    mask = (t < T)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + t.to(tl.int64)[:, None] * N + n[None, :], total_TN.to(out_ptr.dtype.element_ty), mask=mask)


def _constants(width: int, top_k: int, t: Tile) -> dict[str, Any]:
    return {"N": width, "K": top_k, "BLOCK_T": t.block_m, "BLOCK_N": t.block_n}


@torch.library.custom_op("miles_spmd::combine", mutates_args=())
def combine(y_MN: torch.Tensor, weights_TK: torch.Tensor, place_TK: torch.Tensor) -> torch.Tensor:
    """[M, N], float32 [T, K], int64 [T, K] -> [T, N] in the dtype of y."""
    out_TN = _out(y_MN, weights_TK, place_TK)
    check("combine", y_MN, weights_TK, place_TK)
    (num_tokens, top_k), width = place_TK.shape, y_MN.shape[1]
    t = tile("combine", y_MN.dtype, 1, width, arch_of(y_MN))
    if num_tokens:
        grid = (triton.cdiv(num_tokens, t.block_m) * triton.cdiv(width, t.block_n),)
        arguments = (y_MN, weights_TK, place_TK, out_TN, num_tokens)
        _combine[grid](*arguments, **_constants(width, top_k, t), num_warps=t.warps, num_stages=t.stages)
    return out_TN


@combine.register_fake
def _out(y_MN: torch.Tensor, weights_TK: torch.Tensor, place_TK: torch.Tensor) -> torch.Tensor:
    fits = y_MN.ndim == weights_TK.ndim == 2 and weights_TK.shape == place_TK.shape and y_MN.shape[0] == place_TK.numel()
    fits = fits and y_MN.shape[1] > 0 and place_TK.shape[1] > 0
    dtypes = y_MN.dtype in DTYPES and weights_TK.dtype is torch.float32 and place_TK.dtype is torch.int64
    require("combine", fits and dtypes, SUPPORTED, y_MN, weights_TK, place_TK)
    return y_MN.new_empty(place_TK.shape[0], y_MN.shape[1])


def specs(dtype: torch.dtype, arch: str) -> list[Spec]:
    """A width that whole blocks cover, and one that divides nothing."""
    variants = []
    for width, top_k in ((2048, 8), (100, 3)):
        t = tile("combine", dtype, 1, width, arch)
        constants, values = _constants(width, top_k, t), "*" + DTYPES[dtype]
        pointers = {"y_ptr": values, "weights_ptr": "*fp32", "place_ptr": "*i64", "out_ptr": values}
        signature = {**pointers, "T": "i32", **dict.fromkeys(constants, "constexpr")}
        variants.append(Spec(f"[M, {width}], [T, {top_k}]", _combine, signature, constants, t.warps, t.stages, dtype))
    return variants
