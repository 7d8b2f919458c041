"""RMSNorm on the GPU, alone or with the residual added first: x / sqrt(mean(x^2) + eps) * weight in float32, rounded once.

A row is summed inside one program, in blocks whose size depends on D alone. The sum x + residual is rounded to its dtype before it is
normed, because that rounded sum is what the next layer adds to.

Legend: M rows, D columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.tiles import DTYPES, Spec, Tile, arch_of, check, require, tile

SUPPORTED = "x and residual [M, D], weight [D], all bfloat16 or all float32, D at least 1"


@triton.jit
def _row_block(x_ptr, residual_ptr, offsets, mask, RESIDUAL: tl.constexpr):
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["M", "eps"])
def _rmsnorm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    M,
    eps,
    D: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    row_M1 = m.to(tl.int64)[:, None] * D
    squares_MD = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, D, BLOCK_D):
        columns = (start + d)[None, :]
        mask = (m < M)[:, None] & (columns < D)
        x_MD = _row_block(x_ptr, residual_ptr, row_M1 + columns, mask, RESIDUAL)
        squares_MD += x_MD * x_MD
    scale_M = tl.rsqrt(tl.sum(squares_MD, 1) / D + eps)
    for start in range(0, D, BLOCK_D):
        columns = (start + d)[None, :]
        mask = (m < M)[:, None] & (columns < D)
        # Read again: a row is in the first-level cache. The sum is added again rather than read back from what another thread wrote.
        x_MD = _row_block(x_ptr, residual_ptr, row_M1 + columns, mask, RESIDUAL)
        weight_1D = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
        y_MD = x_MD * scale_M[:, None] * weight_1D
        tl.store(y_ptr + row_M1 + columns, y_MD.to(y_ptr.dtype.element_ty), mask=mask)
        if RESIDUAL:
            tl.store(sum_ptr + row_M1 + columns, x_MD.to(sum_ptr.dtype.element_ty), mask=mask)


def _constants(dim: int, residual: bool, t: Tile) -> dict[str, Any]:
    return {"D": dim, "RESIDUAL": residual, "BLOCK_M": t.block_m, "BLOCK_D": t.block_n}


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, y: torch.Tensor, total: torch.Tensor) -> None:
    num_rows, dim = x.shape
    t = tile("rmsnorm", x.dtype, 1, dim, arch_of(x))
    if num_rows:
        constants = _constants(dim, residual is not None, t)
        arguments = (x, x if residual is None else residual, weight, y, total, num_rows, eps)
        _rmsnorm[(triton.cdiv(num_rows, t.block_m),)](*arguments, **constants, num_warps=t.warps, num_stages=t.stages)


@torch.library.custom_op("miles_spmd::rmsnorm", mutates_args=())
def rmsnorm(x_MD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """[M, D], [D] -> [M, D]."""
    y_MD = _like(x_MD, weight_D, eps)
    check("rmsnorm", x_MD, weight_D)
    _launch(x_MD, None, weight_D, eps, y_MD, y_MD)
    return y_MD


@rmsnorm.register_fake
def _like(x_MD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    _check_shapes(x_MD, weight_D)
    return torch.empty_like(x_MD)


@torch.library.custom_op("miles_spmd::rmsnorm_residual", mutates_args=())
def rmsnorm_residual(
    x_MD: torch.Tensor, residual_MD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, D], [M, D], [D] -> the norm of x + residual, and x + residual, both [M, D]."""
    y_MD, sum_MD = _two_like(x_MD, residual_MD, weight_D, eps)
    check("rmsnorm_residual", x_MD, residual_MD, weight_D)
    _launch(x_MD, residual_MD, weight_D, eps, y_MD, sum_MD)
    return y_MD, sum_MD


@rmsnorm_residual.register_fake
def _two_like(x_MD: torch.Tensor, residual_MD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    _check_shapes(x_MD, weight_D, residual_MD)
    return torch.empty_like(x_MD), torch.empty_like(x_MD)


def _check_shapes(x_MD: torch.Tensor, weight_D: torch.Tensor, residual_MD: torch.Tensor | None = None) -> None:
    residual = x_MD if residual_MD is None else residual_MD
    fits = x_MD.ndim == 2 and weight_D.shape == x_MD.shape[1:] and x_MD.shape[1] > 0 and residual.shape == x_MD.shape
    same = x_MD.dtype in DTYPES and weight_D.dtype is x_MD.dtype is residual.dtype
    require("rmsnorm" if residual_MD is None else "rmsnorm_residual", fits and same, SUPPORTED, x_MD, residual_MD, weight_D)


def specs(dtype: torch.dtype, arch: str) -> list[Spec]:
    """A head, a row of two blocks, and one whose width divides nothing."""
    variants = []
    for dim, residual in ((128, False), (4096, True), (5000, True)):
        t = tile("rmsnorm", dtype, 1, dim, arch)
        constants = _constants(dim, residual, t)
        pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "y_ptr", "sum_ptr"), "*" + DTYPES[dtype])
        signature = {**pointers, "M": "i32", "eps": "fp32", **dict.fromkeys(constants, "constexpr")}
        label = f"[M, {dim}]" + " + residual" * residual
        variants.append(Spec(label, _rmsnorm, signature, constants, t.warps, t.stages, dtype))
    return variants
